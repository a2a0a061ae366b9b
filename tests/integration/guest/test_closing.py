"""Closing a scope, also by an exception, leaves torch, model and scaler as they were; nobody waits for anybody."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.scope import Forgettable, open_scopes
from ampscope.capture.torch_support.threads import changing
from ampscope.trace.schema import EventKind, Table
from tests.support.training.small_loop import WIDTH
from tests.support.training.torch_state import dress, installed
from tests.support.training.training_loop import TrainingLoop


@pytest.fixture
def loop() -> TrainingLoop:
    return TrainingLoop()


class Failure(Exception):
    """What the user's own code raises here."""


class Boom(torch.autograd.Function):
    """Fails in backward, with whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def fail_in_forward(loop: TrainingLoop, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    hook = loop.model.get_submodule("second").register_forward_hook(fail)
    try:
        loop.loss()
    finally:
        hook.remove()


def fail_in_loss(loop: TrainingLoop, error: BaseException) -> None:
    loop.loss()
    raise error


def fail_in_backward(loop: TrainingLoop, error: BaseException) -> None:
    Boom.apply(loop.loss(), error).backward()


def fail_in_optimizer(loop: TrainingLoop, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    loop.scaler.scale(loop.loss()).backward()
    hook = loop.optimizer.register_step_pre_hook(fail)
    try:
        loop.scaler.step(loop.optimizer)
    finally:
        hook.remove()


FAILURES = [fail_in_forward, fail_in_loss, fail_in_backward, fail_in_optimizer]


class TestClosing:
    @pytest.mark.parametrize("every", [None, 0, 1], ids=["default", "every=0", "every=1"])
    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_everything_is_as_it_was(self, loop: TrainingLoop, watch: Any, every: int | None, steps: int) -> None:
        before, plain = installed(), dress(*loop.parts())
        scope = watch(loop.model, loop.scaler, every=every)
        loop.step(steps)
        loop.loss()  # and a step that is never finished
        scope.close()
        assert installed() == before
        assert [row[0] for row in dress(*loop.parts())] == [row[0] for row in plain]
        assert dress(loop.model) == plain[: len(list(loop.model.modules()))]

    @pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, SystemExit], ids=lambda kind: kind.__name__)
    @pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
    @pytest.mark.parametrize("steps", [0, 3])
    def test_also_when_the_scope_is_left_by_an_exception(
        self, loop: TrainingLoop, run_folder: Path, fail: Callable[..., None], kind: type[BaseException], steps: int
    ) -> None:
        before, plain = installed(), [row[0] for row in dress(*loop.parts())]
        error = kind("on purpose")
        with (  # the scope is left by the exception
            pytest.raises(kind),
            ampscope.watch(loop.model, loop.scaler, dir=run_folder, quiet=True, every=1),
        ):
            loop.step(steps)
            fail(loop, error)
        assert installed() == before
        assert [row[0] for row in dress(*loop.parts())] == plain
        run = ampscope.open_run(run_folder)
        assert run.status == "closed"
        (note,) = run.rows(Table.EVENTS, kind=EventKind.NOTE)
        assert kind.__name__ in note.text
        assert not run.rows(Table.EVENTS, kind=EventKind.WARNING)

    @pytest.mark.parametrize("fail", [f for f in FAILURES if f is not fail_in_backward], ids=lambda fail: fail.__name__)
    def test_no_mode_stays_active_after_an_exception_that_the_loop_survives(
        self, loop: TrainingLoop, watch: Any, fail: Callable[..., None]
    ) -> None:
        """Evaluation, logging and saving come next, not always another step."""
        scope = watch(loop.model, loop.scaler, every=1)
        loop.step()
        with pytest.raises(Failure):
            fail(loop, Failure())
        stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        if fail is not fail_in_loss:  # nothing tells AMPscope of that one until the next step
            assert stacks == (0, 0)
        loop.optimizer.zero_grad()
        loop.scaler._per_optimizer_states.clear()
        loop.step(2)
        scope.close()
        rows = ampscope.open_run(scope.folder).rows(Table.STEPS)
        assert len(rows) >= 3
        assert rows[-1].loss is not None

    def test_twice_is_once(self, loop: TrainingLoop, watch: Any) -> None:
        before = installed()
        scope = watch(loop.model, loop.scaler)
        loop.step()
        scope.close()
        scope.close()
        assert installed() == before

    def test_a_closed_scope_records_nothing_more(self, loop: TrainingLoop, watch: Any) -> None:
        scope = watch(loop.model, loop.scaler)
        loop.step(2)
        scope.close()
        loop.step(2)
        assert len(ampscope.open_run(scope.folder).rows(Table.STEPS)) == 2

    def test_copies_made_while_watched_are_bare_after_it(self, watch: Any) -> None:
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
        plain = [type(module) for module in model.modules()]
        scope = watch(model)
        twin, sister = copy.deepcopy(model), type(model[1])(WIDTH, WIDTH)
        scope.close()
        assert [type(module).__mro__[1:] for module in twin.modules()] == [kind.__mro__[1:] for kind in plain]
        assert type(sister) is nn.Linear


@pytest.fixture
def held_elsewhere() -> Iterator[None]:
    """Another thread is putting something in place, and comes to no end."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with changing:
            held.set()
            assert over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    yield
    over.set()
    thread.join(30)


def watched(folder: Path) -> ampscope.Scope:
    return ampscope.watch(nn.Linear(2, 2), dir=folder, quiet=True)


def test_a_closed_scope_goes_without_waiting(run_folder: Path, request: pytest.FixtureRequest) -> None:
    scope = watched(run_folder)
    scope.close()
    request.getfixturevalue("held_elsewhere")
    del scope
    gc.collect()  # would never return


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("held_elsewhere")
def test_a_forked_child_may_watch() -> None:
    child = os.fork()
    if not child:
        with changing:  # would never be given: its holder was not forked
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_could_not_be_closed_is_closed_by_the_next_watch(tmp_path: Path) -> None:
    scope = watched(tmp_path / "first")
    other = threading.Thread(target=Forgettable.__del__, args=(scope,))
    with changing:
        other.start()
        other.join(30)
    with ampscope.open_run(tmp_path / "first") as run:
        assert run.status == "open"
    with watched(tmp_path / "second"):
        assert scope not in open_scopes()
        with ampscope.open_run(tmp_path / "first") as run:
            assert run.status == "closed"
