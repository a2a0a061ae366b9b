"""Interrupts a training in the middle of AMPscope's own code, at a line that is counted."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ampscope.capture

_CAPTURE = str(Path(ampscope.capture.__file__).parent)
#: Where a traced line may begin, and nothing from outside can come: ``try:`` has no instruction of its own.
_NOWHERE = ("NOP", "PUSH_EXC_INFO")


class Interrupting:
    """In its body, ``interrupt`` is called at the ``at``-th line that capture runs; never, where that is 0.

    Attributes:
        lines: How many it has run.
        where: The file, function and line of the interruption; None where it did not come to that.
    """

    def __init__(self, at: int, interrupt: Callable[[], object]) -> None:
        self.lines = 0
        self.where: tuple[str, str, int] | None = None
        self._at = at
        self._interrupt = interrupt
        self._before: Any = None

    def __enter__(self) -> Interrupting:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_CAPTURE) or code.co_flags & inspect.CO_GENERATOR:
            return None  # a generator is also entered to be let go, and Python drops what is raised there
        self._line(frame, event, None)
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event in ("call", "line") and self.where is None:
            self.lines += 1
            if self.lines >= self._at > 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] not in _NOWHERE:
                code = frame.f_code
                self.where = code.co_filename.rpartition("/")[2], code.co_qualname, frame.f_lineno
                sys.settrace(None)
                self._interrupt()
        return self._line
