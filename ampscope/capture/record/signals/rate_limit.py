"""How often alerts are told: a few at once, then one from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Alerts that are told at once, and seconds between those after them.
FIRST, INTERVAL_S = 5, 600.0


class RateLimit:
    """Lets the first few pass, then one in an interval, and counts the others.

    Args:
        first: How many pass at once.
        interval: Seconds between the others.
        clock: Tells the time, in seconds.
    """

    def __init__(
        self, first: int = FIRST, interval: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first = first
        self._interval = interval
        self._clock = clock
        self._last = float("-inf")
        self._held = 0

    def admits(self) -> int | None:
        """Asks for one more: how many were held back since the one before, or None where this one is, too."""
        now = self._clock()
        if self._first <= 0 and now - self._last < self._interval:
            self._held += 1
            return None
        self._first -= 1
        self._last, held, self._held = now, self._held, 0
        return held
