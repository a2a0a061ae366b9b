"""Tells a loss or gradient norm that is far out of its band from the noise, the trends and the jumps of training."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import NamedTuple

#: Good steps that a band is made of, and how many of them it takes.
WINDOW, ENOUGH = 64, 20
#: A spike is this many times larger than the largest value of its band,
FACTOR = 10.0
#: and this many median absolute deviations of the logarithm from its median, or, where less, of its steps up and down:
#: a loss that is falling is spread wide although each step says where the next will be,
DEVIATIONS = 10.0
#: which are taken for at least this much: a factor of about 1.1.
LEAST_DEVIATION = 0.1
#: As large as this share of what it was in the first steps: what has all but vanished may come back.
SHARE_OF_FIRST = 0.5
#: Steps after which the largest value of the band is looked for again.
REVIEW_EVERY = 16


class Spike(NamedTuple):
    """A value far out of its band, with what is usual."""

    value: float
    usual: float  #: median of the band
    highest: float  #: its largest value
    steps: int  #: that it is made of


class Band:
    """One quantity over the latest good steps; every value joins it, so that what stays is soon usual.

    Cheap by keeping the largest value of the band, or one that has just left it: the band itself is looked at only
    where that is exceeded by far.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._first = 0.0  # median of the first steps
        self._largest = math.inf
        self._is_signed = False  # such a loss has no scale on which it could be large

    def take(self, value: float) -> Spike | None:
        """Takes the value of a good step; returns the spike that it is, if it is one."""
        spike = self._far_out(value) if value > FACTOR * self._largest else None
        self._values.append(value)
        self._seen += 1
        self._is_signed |= value < 0
        if self._seen >= ENOUGH and (self._seen - ENOUGH) % REVIEW_EVERY == 0:
            self._first = self._first or median(self._values)
            self._largest = max(self._values)
        elif value > self._largest:
            self._largest = value
        return spike

    def _far_out(self, value: float) -> Spike | None:
        if self._is_signed or not math.isfinite(value) or value < SHARE_OF_FIRST * self._first:
            return None
        highest = max(self._values)
        logs = [math.log(each) for each in self._values if each > 0]
        if len(logs) < ENOUGH or value <= FACTOR * highest:
            return None
        middle = median(logs)
        spread = median(abs(each - middle) for each in logs)
        moves = median(abs(after - before) for before, after in pairwise(logs))
        deviation = max(LEAST_DEVIATION, min(spread, moves))
        if math.log(value) - middle <= DEVIATIONS * deviation:
            return None
        return Spike(value, math.exp(middle), highest, len(self._values))
