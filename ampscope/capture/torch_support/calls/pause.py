"""Whether AMPscope itself computes: what hears of ops and functions leaves those calls out."""

from __future__ import annotations

import time


class Pause:
    """One switch for all that hears of a run's calls: it is turned dozens of times a step.

    Attributes:
        on: The calls that come now are AMPscope's own.
        glanced: Seconds that glances have taken.
    """

    __slots__ = ("_began", "glanced", "on")

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.glanced = 0.0
        self._began = 0.0

    def begin_glance(self) -> None:
        """A glance at one function of the loop's begins: too short, and too often, to be set apart as other work is."""
        self.on = True
        self._began = time.perf_counter()

    def end_glance(self) -> None:
        """It ends; the loop goes on."""
        self.glanced += time.perf_counter() - self._began
        self.on = False
