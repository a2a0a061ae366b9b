"""Interrupts a training in the middle of AMPscope's own code, at a line that is counted."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ampscope.capture
import ampscope.cures

_CAPTURE = tuple(str(Path(room.__path__[0])) + os.sep for room in (ampscope.capture, ampscope.cures))
#: Where a traced line may begin, and nothing from outside can come: ``try:`` has no instruction of its own.
_NOWHERE = ("NOP", "PUSH_EXC_INFO")


class Interrupting:
    """In its body, ``interrupt`` is called at the ``at``-th line that capture runs; never, where that is 0.

    Args:
        at: The line.
        interrupt: What comes there.
        within: Qualified name of the function whose lines alone are counted; empty for those of all.

    Attributes:
        lines: How many it has run.
        where: The file, function and line of the interruption; None where it did not come to that.
    """

    def __init__(self, at: int, interrupt: Callable[[], object], within: str = "") -> None:
        self.lines = 0
        self.where: tuple[str, str, int] | None = None
        self._at = at
        self._interrupt = interrupt
        self._within = within
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
        if self._within and code.co_qualname != self._within:
            return None
        self._passed(frame)
        handler = _handler(code, frame.f_lasti)

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal handler
            before, handler = handler, _handler(code, frame.f_lasti)
            if event == "line" and handler == before:
                self._passed(frame)
            return line

        return line

    def _passed(self, frame: FrameType) -> None:
        if self.where is None:
            self.lines += 1
            if self.lines >= self._at > 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] not in _NOWHERE:
                code = frame.f_code
                self.where = code.co_filename.rpartition("/")[2], code.co_qualname, frame.f_lineno
                sys.settrace(None)
                self._interrupt()


@functools.cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """Which instructions, from the first to past the last, have which one as their handler."""
    return [(each.start, each.end, each.target) for each in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]


@functools.cache
def _handler(code: CodeType, offset: int) -> int:
    """Where what is raised at an instruction is handled; -1 where it leaves the function.

    Python looks for what comes from outside as a call ends. What comes with the last call before a ``finally``, or a
    ``try``, is raised there, and not in the line after it.
    """
    return next((target for start, end, target in _handlers(code) if start <= offset < end), -1)
