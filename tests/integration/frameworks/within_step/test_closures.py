"""``optimizer.step(closure)``: judged when the closure returns, before the optimizer writes; unseen while it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope import diagnose
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause
from tests.integration.frameworks.within_step.log_model import batch_of, log_model, loss_of
from tests.support.primary import primary_incident
from tests.support.training.small_loop import POISONED, STEPS
from tests.support.training.twin_runs import EXACT, Watched, train_both

Watch = Callable[..., Any]


def one_closure(watch: Watch, make: Callable[..., Any] = torch.optim.AdamW, *, bad: bool, by_name: bool = False) -> Any:
    """Forward, clearing and backward inside ``step``, and clipping, in the order in which Lightning has them."""
    model = log_model()
    optimizer = make(model.parameters(), 0.01)
    watch(model)
    for step in range(STEPS):
        x, y = batch_of(step, bad=bad)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = loss_of(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    return [model, optimizer]


def accumulated(watch: Watch, *, bad: bool) -> Any:
    """Two micro-batches before ``step``, the last in its closure; a bad first one is found all the same."""
    model = log_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    watch(model)
    for step in range(STEPS):
        for number in range(2):
            (loss_of(model, *batch_of(step, bad=bad and not number)) / 3).backward()
        x, y = batch_of(step, bad=False)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = loss_of(model, x, y) / 3
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
    return [model, optimizer]


def do_nothing() -> Any:
    """What Lightning passes in manual optimization."""


def nothing_in_the_closure(watch: Watch, *, bad: bool) -> Any:
    model = log_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    watch(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch_of(step, bad=bad)).backward()
        optimizer.step(do_nothing)
    return [model, optimizer]


class Unheeding(torch.optim.SGD):
    """Does not call the closure that it is given."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class Derived(torch.optim.AdamW):
    """Hands the closure on to the class that it extends, whose ``step`` torch surrounds with hooks too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def closure_not_called(watch: Watch, *, bad: bool) -> Any:
    model = log_model()
    optimizer = Unheeding(model.parameters(), 0.01)
    watch(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch_of(step, bad=bad)).backward()
        optimizer.step(do_nothing)
    return [model, optimizer]


def lbfgs(watch: Watch, *, bad: bool, evaluation: int = 1) -> Any:
    """The closure is called several times a step, each time on other weights; one of the calls is the bad one."""
    model = log_model()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
    watch(model)
    for step in range(STEPS):
        batches = [batch_of(step, bad=bad and number == evaluation) for number in range(8)]

        def closure(batches: list[tuple[Tensor, Tensor]] = batches) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *batches.pop(0))
            loss.backward()
            return loss

        optimizer.step(closure)
    return [model, optimizer]


LOOPS: dict[str, Callable[..., Any]] = {
    "AdamW": one_closure,
    "AdamW, by name": partial(one_closure, by_name=True),
    "AdamW, fused": partial(one_closure, make=partial(torch.optim.AdamW, fused=True)),
    "a class derived from AdamW": partial(one_closure, make=Derived),
    "SGD": partial(one_closure, make=torch.optim.SGD),
    "Adafactor": partial(one_closure, make=torch.optim.Adafactor),
    "accumulated": accumulated,
    "nothing in the closure": nothing_in_the_closure,
    "closure not called": closure_not_called,
    "LBFGS, first evaluation": partial(lbfgs, evaluation=0),
    "LBFGS, a later evaluation": partial(lbfgs, evaluation=1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_bad_step_is_judged_before_the_optimizer_writes(name: str, run_folder: Path) -> None:
    watched = train_both(partial(LOOPS[name], bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.cause, primary.op, primary.module) == (Cause.LOG_ZERO, "aten.log.default", "1")
    assert (primary.step, primary.replay) == (POISONED, ReplayStatus.EXACT)
    assert [row.step for row in watched.incidents].count(POISONED) == 1
    assert [row.step for row in watched.steps] == list(range(STEPS))
    assert watched.warnings == []


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_in_which_nothing_goes_wrong_is_healthy(name: str, run_folder: Path) -> None:
    watched = train_both(partial(LOOPS[name], bad=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"
    assert (watched.incidents, watched.findings, watched.warnings) == ([], [], [])
    assert all(row.grad_norm is not None for row in watched.steps)


def test_nothing_listens_while_the_optimizer_computes(run_folder: Path) -> None:
    """Its arithmetic is none of the tape's: each of its many calls would cost time."""
    heights: list[int] = []

    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = torch.enable_grad()(closure)()
            heights.append(torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack())
            super().step()
            return loss

    watched = Watched.train(partial(one_closure, make=Counting, bad=False), run_folder, every=1)
    assert heights == [0] * STEPS
    assert [row.step for row in watched.steps] == list(range(STEPS))


def test_what_the_tape_takes_is_told(run_folder: Path) -> None:
    """Between the model's calls the tape looks at each function; a loss of many makes it look often."""

    def loop(watch: Watch) -> Any:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        watch(model, every=0)
        for step in range(8):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).mean()
            for _ in range(2000 if step == 7 else 0):
                loss = loss * 1.0
            loss.backward()
            optimizer.step()
        return model

    rows = Watched.train(loop, run_folder).steps
    assert rows[7].observing_s > 5 * min(row.observing_s for row in rows[:7])


class Descent(torch.optim.Optimizer):
    """Two evaluations a step, and an exception in the middle of two of its steps."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__(weights, {})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for _ in range(2 if closure is not None else 1):
            if closure is not None:
                torch.enable_grad()(closure)()
            self.calls += 1
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.sub_(weight.grad, alpha=0.01)
                    if self.calls in (2, 2 * STEPS):
                        raise ValueError("on purpose")


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_steps_go_on_after_an_exception_inside_the_optimizer(
    run_folder: Path, *, with_closure: bool, again: bool
) -> None:
    """Without a scaler nothing stands around ``optimizer.step`` that could notice."""

    def loop(watch: Watch) -> Any:
        model = log_model()
        optimizer = Descent(model.parameters())
        watch(model)
        for step in range(STEPS + 2):
            x, y = batch_of(step, bad=True)

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            if not with_closure:
                closure()
            for _ in range(1 + again):
                with contextlib.suppress(ValueError):
                    optimizer.step(closure if with_closure else None)
                    break
        return [model, optimizer, optimizer.calls]

    watched = train_both(loop, run_folder)
    first = watched.incidents[0]
    assert first.step == (POISONED if again else POISONED - 1)  # a step that was not completed is none
    assert (first.replay, first.replay_reason) == EXACT
    failed = 0 if again else 1 + with_closure
    assert [row.step for row in watched.steps] == list(range(STEPS + 2 - failed))
    assert watched.warnings == []


def test_steps_go_on_after_an_exception_inside_the_closure(run_folder: Path) -> None:
    def loop(watch: Watch) -> Any:
        model = log_model()
        optimizer = Descent(model.parameters())
        optimizer.calls = 2 * STEPS  # no exception of its own
        watch(model)
        for step in range(STEPS):
            calls: list[int] = []

            def closure(step: int = step, calls: list[int] = calls) -> Tensor:
                calls.append(step)
                if step < 2 and len(calls) > step:
                    raise ValueError("on purpose")
                optimizer.zero_grad()
                loss = loss_of(model, *batch_of(step, bad=True))
                loss.backward()
                return loss

            with contextlib.suppress(ValueError):
                optimizer.step(closure)
        return [model, optimizer]

    watched = train_both(loop, run_folder)
    assert watched.replay_of(watched.incidents[0].step) == EXACT
    assert len(watched.steps) == STEPS - 2
    assert watched.warnings == []
