"""The one place that catches AMPscope's own faults, so that none of them reaches the training loop."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType

import torch

from ampscope.capture.torch_support.interruption import is_interruption
from ampscope.trace.vocabulary import DEVICE_FAILED, SWITCHED_OFF

_BY_DEVICE = ("CUDA error:", "HIP error:", "device-side assert", "CUBLAS_STATUS_", "CUDNN_STATUS_EXECUTION_FAILED")
#: Set to True to let faults through; for AMPscope's own tests.
RAISE = False


def is_of_device(error: BaseException) -> bool:
    """Whether a device tells of what ran on it earlier; the first call that waits for it hears that, ours or not."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BY_DEVICE)
    )


class Suppressed:
    """A context that lets no exception out and keeps it: for running the user's own code once more, in a replay.

    What interrupts that code from outside (a signal handler) is not its exception, and goes on.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Suppressed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or is_interruption(error):
            return False
        self.error = error.with_traceback(None)
        return True


class Guard:
    """A reusable context for one part of AMPscope: a fault inside disables the part, with one warning that names it.

    What is no fault of the part goes on to the loop: `KeyboardInterrupt` and `SystemExit`, and what a signal handler of
    the user's raises while the part runs.

    Args:
        part: What the part does, as the user would say it, e.g. ``the step tape``.
        on_fault: Called once with a one-line description; also where the part removes what it installed.
    """

    __slots__ = ("broken", "on_fault", "part")

    def __init__(self, part: str, on_fault: Callable[[str], None]) -> None:
        self.part = part
        self.on_fault = on_fault
        self.broken = False

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            return False
        if RAISE or not isinstance(error, Exception) or is_interruption(error):
            return False
        if not self.broken:
            self.broken = True
            self._report(error)
        return True

    def _report(self, error: Exception) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        told = f"{type(error).__name__}: {error}"
        if is_of_device(error):
            text = f"{self.part} {SWITCHED_OFF}, {DEVICE_FAILED} ({told.splitlines()[0]})"
            goes_on = "the training's next call on it raises the same"
        else:
            text, goes_on = f"{self.part} {SWITCHED_OFF} after {told} ({place})", "training goes on unchanged"
        with contextlib.suppress(Warning):  # where warnings are errors, this one still is none of the loop's
            warnings.warn(f"ampscope: {text}; {goes_on}", RuntimeWarning, stacklevel=4)
        self.on_fault(text)
