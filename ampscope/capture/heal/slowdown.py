"""What changes cost: the time of steps before and after."""

from __future__ import annotations

from collections import deque
from statistics import median, quantiles

#: Steps that are compared, at least and at most.
_LEAST, _MOST = 12, 48


class Slowdown:
    """Durations of good steps without and with the changes that are in force."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_MOST)
        self._after: deque[float] = deque(maxlen=_MOST)
        self._changed = False

    def changed(self) -> None:
        """Another change is in force; what it costs is measured from here on."""
        self._changed = True
        self._after.clear()

    def unchanged(self) -> None:
        """None is in force any more."""
        self._changed = False

    def took(self, seconds: float) -> None:
        """A good step took so long."""
        (self._after if self._changed else self._before).append(seconds)

    @property
    def share(self) -> float | None:
        """What steps take longer, as a share; None where too few were seen, or they differ by less than they vary."""
        if min(len(self._before), len(self._after)) < _LEAST:
            return None
        low, high = quantiles(self._after, n=4)[0], quantiles(self._before, n=4)[2]
        return median(self._after) / median(self._before) - 1.0 if low > high else None
