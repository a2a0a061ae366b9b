"""How long to wait before the next try: longer with each that failed, by chance, so that not all come at once."""

from __future__ import annotations

import random


class Backoff:
    """Exponential back-off with full jitter.

    Args:
        first: Seconds after the first failure, at most.
        most: Seconds after any.
        chance: A source of random numbers of its own; the training's are never drawn from.
    """

    def __init__(self, first: float = 1.0, most: float = 60.0, chance: random.Random | None = None) -> None:
        self._first = first
        self._most = most
        self._chance = chance or random.Random()  # no secret
        self.failures = 0  #: one after another

    def worked(self) -> None:
        """The last try did what it should."""
        self.failures = 0

    def failed(self) -> float:
        """Counts a failure; returns the seconds to wait, between half of what is due and all of it."""
        due = min(self._first * 2.0 ** min(self.failures, 32), self._most)
        self.failures += 1
        return due * self._chance.uniform(0.5, 1.0)
