"""AMPscope's own work within a step: timed, unseen by its own trace and by modes of the user's, without collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ampscope.capture.replay.tape_mode import TapeMode
from ampscope.capture.torch_support.communication.refusal import NoCollectives
from ampscope.capture.torch_support.torch_private import OthersAside
from ampscope.capture.tracing.program.function_watch import FunctionWatch
from ampscope.capture.tracing.tracer import Tracer


def _is_ours(mode: object) -> bool:
    return isinstance(mode, (TapeMode, Tracer, FunctionWatch, NoCollectives))


class OwnWork:
    """A context that may be entered again inside itself.

    Args:
        pause: Called with True when work begins and with False when it ends: what observes ops leaves out what follows.
    """

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self._pause = pause
        self._aside = OthersAside(_is_ours)
        self._alone = NoCollectives()
        self._depth = 0
        self._started = 0.0
        self._taken = 0.0

    @property
    def seconds(self) -> float:
        """What it has taken since `start_over`, what is running now included."""
        return self._taken + (time.perf_counter() - self._started if self._depth else 0.0)

    def start_over(self) -> None:
        """A step begins: its work is counted from here."""
        self._taken, self._started = 0.0, time.perf_counter()

    def __enter__(self) -> OwnWork:
        self._depth += 1
        if self._depth == 1:
            self._started = time.perf_counter()
            self._pause(True)
            self._aside.__enter__()
            self._alone.enter()
        return self

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._alone.leave()
            self._aside.__exit__()
            self._pause(False)
            self._taken += time.perf_counter() - self._started
