"""Tells code at the top of a loop from code at its end, by the lines at which its frames stand."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

Position = tuple[tuple[CodeType, int], ...]


def here() -> Position:
    """Every frame that leads here, the outermost first, with its line."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames[::-1])


def is_above(one: Position, other: Position) -> bool:
    """Whether ``one`` stands above ``other`` in the innermost frame that both have in common; undecided counts so."""
    for (code, line), (other_code, other_line) in zip(one, other, strict=False):
        if code is not other_code:
            return True
        if line != other_line:
            return line < other_line
    return True
