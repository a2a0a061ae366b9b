"""A part that faults is switched off with one warning; what a device has failed in is told as the training's own."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

from ampscope.capture.torch_support import guard
from ampscope.capture.torch_support.guard import Guard, is_of_device
from ampscope.trace.vocabulary import DEVICE_FAILED


def _told(error: Exception) -> tuple[str, str]:
    texts: list[str] = []
    part = Guard("the step record", texts.append)
    with pytest.warns(RuntimeWarning) as warned, part:
        raise error
    assert part.broken
    return texts[0], str(warned[0].message)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ..."),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_what_a_device_failed_in_is_no_fault_of_ours(error: Exception) -> None:
    text, warning = _told(error)
    assert text.startswith(f"the step record switched itself off, {DEVICE_FAILED} (")
    assert str(error).splitlines()[0] in text
    assert "kernel errors" not in text
    assert warning.endswith("the training's next call on it raises the same")


@pytest.mark.parametrize(
    "error", [ValueError("CUDA error: no"), RuntimeError("shapes differ"), torch.OutOfMemoryError()]
)
def test_any_other_error_is(error: Exception) -> None:
    assert not is_of_device(error)
    text, warning = _told(error)
    assert f"switched itself off after {type(error).__name__}" in text
    assert "test_guard.py" in text
    assert warning.endswith("training goes on unchanged")


@pytest.mark.parametrize("shown", [ValueError("I/O operation on closed file"), KeyError("no such style"), Warning()])
def test_a_warning_that_cannot_be_shown_is_told_all_the_same(shown: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object, **__: object) -> None:
        raise shown

    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        with Guard("the step record", texts.append):
            raise RuntimeError("on purpose")
    assert texts


def test_nor_need_the_record_be_there() -> None:
    def on_fault(_: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(RuntimeWarning), Guard("the step record", on_fault):
        raise RuntimeError("on purpose")


class TestDoors:
    """Whatever happens behind one, the loop's call runs once, and what comes out is its own."""

    def test_a_fault_before_the_call(self) -> None:
        def run(call: Any, args: Any, kwargs: Any) -> Any:
            raise RuntimeError("ours")

        assert guard.through(run, max, (1, 2), {}) == 2

    def test_a_fault_after_it(self) -> None:
        calls: list[int] = []

        def run(call: Any, args: Any, kwargs: Any) -> Any:
            call(*args)
            raise RuntimeError("ours")

        guard.through(run, calls.append, (1,), {})
        assert calls == [1]

    def test_the_calls_own_exception(self) -> None:
        with pytest.raises(ValueError, match="theirs"):
            guard.through(lambda call, args, kwargs: call(*args), failing, (ValueError("theirs"),), {})

    def test_a_fault_in_hearing_of_it(self) -> None:
        def run(call: Any, args: Any, kwargs: Any) -> Any:
            try:
                return call(*args)
            except ValueError:
                raise RuntimeError("ours")  # noqa: B904  # a fault

        with pytest.raises(ValueError, match="theirs"):
            guard.through(run, failing, (ValueError("theirs"),), {})

    def test_ctrl_c_passes(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            guard.tell(failing, KeyboardInterrupt())
        assert guard.tell(failing, RuntimeError("ours")) is None
        assert guard.here.doors == 0

    def test_an_inner_door_that_own_work_is_broken_off_behind(self) -> None:
        """The loop's code lies between it and the outer one, and must not run on with all put aside."""
        behind = Behind()

        def hook() -> None:
            with pytest.raises(KeyboardInterrupt):
                guard.tell(broken_off, KeyboardInterrupt())
            assert behind.heard == ["interrupted"]
            assert not guard.here.working

        guard.through(lambda call, args, kwargs: call(*args), hook, (), {})
        assert behind.heard == ["interrupted"]

    @pytest.mark.parametrize("is_caught", [True, False])
    def test_an_inner_door_that_is_only_passed(self, *, is_caught: bool) -> None:
        """What was broken off behind it, own work's end perhaps, is put back as the loop's call is over."""
        behind = Behind()

        def hook() -> None:
            with contextlib.suppress(KeyboardInterrupt) if is_caught else contextlib.nullcontext():
                guard.tell(failing, KeyboardInterrupt())
            assert behind.heard == []

        with contextlib.nullcontext() if is_caught else pytest.raises(KeyboardInterrupt):
            guard.through(lambda call, args, kwargs: call(*args), hook, (), {})
        assert behind.heard == ["interrupted"]
        assert guard.tell(behind.heard.clear) is None
        assert behind.heard == []

    def test_a_fault_in_judging_the_loops_own_exception(self, monkeypatch: pytest.MonkeyPatch) -> None:
        behind = Behind()
        for name in ("_is_of_call", "is_interruption"):
            monkeypatch.setattr(guard, name, lambda _: failing(MemoryError()))
        with pytest.raises(ValueError, match="theirs"):
            guard.left(ValueError("theirs"))
        assert behind.heard == []


class Behind:
    """A scope, as doors know it."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        guard.stand_behind(self)

    def failed(self, _: Exception) -> None:
        self.heard.append("failed")

    def interrupted(self) -> None:
        self.heard.append("interrupted")


class TestTakingAway:
    """Once more, where it has failed; then it is left."""

    @pytest.mark.parametrize(("failures", "calls"), [(0, 1), (1, 2), (5, 2)])
    def test_twice_at_most(self, failures: int, calls: int) -> None:
        made: list[int] = []

        def remove() -> None:
            made.append(1)
            if len(made) <= failures:
                raise MemoryError

        guard.surely(remove)
        assert len(made) == calls


def broken_off(error: BaseException) -> None:
    guard.here.working = True
    raise error


def failing(error: BaseException) -> None:
    raise error
