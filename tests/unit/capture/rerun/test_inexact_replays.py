"""Where a replay cannot be exact it says so and why, and training goes on to the same bits all the same."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.capture.isolation import device_asserts
from ampscope.trace.schema import ReplayStatus, Table
from tests.support.training.model_parts import linear
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, mlp, mse, poison, train
from tests.support.training.small_models import Square, TwoLayers
from tests.support.training.twin_runs import Watched, train_both


def _replay_of(loop: Callable[..., Any], folder: Path) -> tuple[str, str]:
    return train_both(loop, folder).replay_of(POISONED)


def test_values_from_outside_the_process(run_folder: Path) -> None:
    class Noisy(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + int.from_bytes(os.urandom(4), "little") / 2**32)

    watched = Watched.train(lambda watch: train(watch, Noisy()), run_folder)
    status, reason = watched.replay_of(POISONED)
    assert status == ReplayStatus.DIVERGED
    assert "Noisy differs" in reason
    assert watched.warnings == []


@pytest.mark.parametrize("through_data", [False, True], ids=["counted", "behind the counters"])
def test_a_weight_that_forward_changes(run_folder: Path, through_data: bool) -> None:
    class Decaying(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                (self.first.weight.data if through_data else self.first.weight).mul_(0.99)
            return super().forward(x)

    status, reason = _replay_of(lambda watch: train(watch, Decaying()), run_folder)
    assert status == ReplayStatus.UNAVAILABLE
    assert "changed inside the forward" in reason


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["the whole loss", "a part of the loss"])
def test_an_autograd_function_in_the_loss_that_the_tape_cannot_see(run_folder: Path, share: float) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x).float()
        return Square.apply(out - y).mean() + share * F.l1_loss(out, y)

    status, reason = _replay_of(lambda watch: train(watch, mlp(), forward), run_folder)
    assert status == ReplayStatus.UNAVAILABLE
    assert "Square" in reason


@pytest.mark.parametrize("error", [StopIteration, ValueError("used up"), AssertionError()], ids=repr)
def test_a_forward_that_works_only_once(run_folder: Path, error: Any) -> None:
    class Once(TwoLayers):
        def forward(self, x: Tensor, ticket: Iterator[None]) -> Tensor:
            if next(ticket, self) is self:
                raise error
            return super().forward(x)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x, iter([None])), y)

    watched = train_both(lambda watch: train(watch, Once(), forward), run_folder)
    status, reason = watched.replay_of(POISONED)
    assert status == ReplayStatus.UNAVAILABLE
    assert (error.__name__ if isinstance(error, type) else type(error).__name__) in reason
    assert watched.warnings == [], "an error of the user's code is no fault of the replay's"


def test_a_gradient_hook_on_a_parameter_that_hides_what_went_wrong(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        linear(model, "0").weight.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
        return train(watch, model)

    status, _ = _replay_of(loop, run_folder)
    assert status in (ReplayStatus.DIVERGED, ReplayStatus.EXACT)


def test_weights_moved_between_forward_and_backward(run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        with torch.no_grad():
            linear(model, "2").bias.add_(0.25)  # autograd does not need it
        return loss

    status, reason = _replay_of(lambda watch: train(watch, mlp(), forward), run_folder)
    assert status == ReplayStatus.DIVERGED
    assert "weights changed" in reason


def _with_one_batch_buffer(overwrite: Callable[[Tensor], object], *, before_backward: bool) -> Callable[..., Any]:
    """A loop whose batches share one buffer, which it overwrites before the step is judged."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        room = torch.zeros(BATCH, WIDTH)
        for step in range(POISONED + 2):
            room.copy_(torch.randn(BATCH, WIDTH))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, room.clone(), torch.zeros(BATCH, WIDTH)) + 0 * room.sum()
            if before_backward:
                overwrite(room)
            poison(step, scaler.scale(loss)).backward()
            if not before_backward:
                overwrite(room)
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    return loop


def _rows(room: Tensor) -> None:
    room[1:3] = torch.ones(2, WIDTH)


@pytest.mark.parametrize("before_backward", [True, False], ids=["before backward", "after it"])
@pytest.mark.parametrize("overwrite", [torch.zero_, _rows, lambda room: room.view(-1).fill_(1)])
def test_an_input_that_the_loop_overwrites_before_the_step_is_judged(
    overwrite: Callable[[Tensor], object], before_backward: bool, run_folder: Path
) -> None:
    status, reason = _replay_of(_with_one_batch_buffer(overwrite, before_backward=before_backward), run_folder)
    assert (status, reason) == (ReplayStatus.EXACT, "")


def test_an_input_that_is_overwritten_where_no_mode_sees_it(run_folder: Path) -> None:
    def overwrite(room: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            room.zero_()

    status, reason = _replay_of(_with_one_batch_buffer(overwrite, before_backward=False), run_folder)
    assert status == ReplayStatus.DIVERGED
    assert "input was changed in place" in reason


def test_one_region_around_the_whole_loop_keeps_stale_casts(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), make_scaler()
        watch(model, scaler)
        with torch.autocast("cpu", dtype=torch.float16):
            for step in range(POISONED + 2):
                optimizer.zero_grad()
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
                poison(step, scaler.scale(loss)).backward()
                scaler.step(optimizer)
                scaler.update()
        return [model, optimizer, scaler]

    status, reason = _replay_of(loop, run_folder)
    assert status == ReplayStatus.DIVERGED
    assert "differs" in reason


def test_a_micro_batch_that_failed_is_missing_from_the_replay(run_folder: Path) -> None:
    """A loop that survives an exception in one micro-batch, as many do on running out of memory."""

    class Failing(TwoLayers):
        def forward(self, x: Tensor, fail: bool) -> Tensor:
            out = super().forward(x)
            if fail:
                raise MemoryError
            return out

    def loop(watch: Callable[..., object]) -> Any:
        model = Failing()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), make_scaler()
        watch(model, scaler)
        for step in range(POISONED + 2):
            for part in range(3):
                try:
                    with torch.autocast("cpu", dtype=torch.float16):
                        out = model(torch.randn(BATCH, WIDTH), fail=part == 1)
                        loss = F.mse_loss(out, torch.randn(BATCH, WIDTH))
                except MemoryError:
                    continue
                scaled = scaler.scale(loss)
                (poison(step, scaled) if part == 0 else scaled).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [model, optimizer, scaler]

    watched = train_both(loop, run_folder)
    status, _ = watched.replay_of(POISONED)
    assert status in (ReplayStatus.EXACT, ReplayStatus.UNAVAILABLE)
    assert [row.micro_batches for row in watched.steps] == [2] * (POISONED + 2)


def test_gradients_left_over_from_a_step_before_are_named_as_such(run_folder: Path) -> None:
    """After a skip the loop forgets ``zero_grad``: the next step is bad through no fault of its own."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), make_scaler()
        watch(model, scaler)
        for step in range(POISONED + 2):
            if step != POISONED + 1:
                optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            poison(step, scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED)[0] == ReplayStatus.EXACT
    status, reason = watched.replay_of(POISONED + 1)
    assert status in (ReplayStatus.UNAVAILABLE, ReplayStatus.DIVERGED)
    assert "gradient" in reason


def test_backward_through_a_function_that_nobody_sees(run_folder: Path) -> None:
    """``from torch.autograd import backward`` before the watch: seen by other means, or the tape says it has none."""
    backward = torch.autograd.backward

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), make_scaler()
        watch(model, scaler)
        for step in range(POISONED + 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            backward([poison(step, scaler.scale(loss))])
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    status, reason = _replay_of(loop, run_folder)
    assert status == ReplayStatus.EXACT or (status == ReplayStatus.UNAVAILABLE and "backward" in reason)


def test_replays_have_a_budget_and_say_when_it_is_spent(run_folder: Path) -> None:
    """A run that skips at every step is not slowed down without end: some replays are left out, with the reason."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = make_scaler(backoff_factor=0.999)
        watch(model, scaler, overhead=0.0)
        for _ in itertools.repeat(None, 5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            poison(POISONED, scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    from ampscope.capture import budgets

    patch = pytest.MonkeyPatch()
    patch.setattr(budgets, "FREE_REPLAY_SECONDS", 0.0)
    try:
        watched = train_both(loop, run_folder)
    finally:
        patch.undo()
    statuses = [row.replay for row in watched.incidents]
    assert statuses == [ReplayStatus.EXACT] * 3 + [ReplayStatus.UNAVAILABLE] * 2
    assert "earlier replays have used up the time" in watched.incidents[-1].replay_reason


#: No state of a module, which a replay would put back.
_CALLS = itertools.count()


class Summed(TwoLayers):
    """Adds rows in another order each time, as the threads of an accelerator do, or something else each time."""

    def __init__(self, apart: float) -> None:
        super().__init__()
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x).float()
        wrong = 1 + self.apart * (1 + 0.618 * next(_CALLS) % 1)
        return torch.zeros_like(out).index_add(0, torch.arange(len(out)), out * wrong)


@pytest.mark.parametrize("on_device", [True, False], ids=["an accelerator", "the host"])
@pytest.mark.parametrize("apart", [1e-5, 0.5], ids=["rounding", "more"])
def test_sums_in_no_fixed_order(
    apart: float, on_device: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(device_asserts, "_RAISING", frozenset())
    watched = Watched.train(lambda watch: train(watch, Summed(apart)), run_folder)
    status, reason = watched.replay_of(POISONED)
    assert status == ReplayStatus.DIVERGED
    is_rounding = on_device and apart < 0.1
    assert ("by no more than rounding, for aten.index_add.default" in reason) is is_rounding
    tried = watched.run.rows(Table.REPLAYS)
    assert bool(tried) is (is_rounding or not on_device), "nothing more is run there on what is another step"
