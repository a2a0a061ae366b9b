"""Finds the object of a framework whose method is calling: what a callback is not handed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calling(wanted: Callable[[object], bool]) -> Any | None:
    """The innermost object, among those whose methods are running now, that is ``wanted``; None where none is."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        thing = frame.f_locals.get("self")
        if thing is not None and wanted(thing):
            return thing
        frame = frame.f_back
    return None
