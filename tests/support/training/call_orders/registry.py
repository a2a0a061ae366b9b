"""The loops by name: those of the manuals, and those with a mistake, its cause and the step at which it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampscope.trace.vocabulary import Cause
from tests.support.training.usage_bench import Watch

Loop = Callable[[Watch], Any]

RIGHT: dict[str, Loop] = {}
WRONG: dict[str, tuple[Loop, Cause, int]] = {}


def right(loop: Loop) -> Loop:
    """Registers a loop that is correct."""
    RIGHT[loop.__name__] = loop
    return loop


def wrong(cause: Cause, step: int = 0) -> Callable[[Loop], Loop]:
    """Registers a loop with the mistake it makes, and the step at which it is found."""

    def register(loop: Loop) -> Loop:
        WRONG[loop.__name__] = loop, cause, step
        return loop

    return register
