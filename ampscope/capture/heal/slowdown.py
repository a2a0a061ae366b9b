"""Measures what a change costs: how long one and the same step takes with it and without it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: Times that a step is run again, each way.
TIMES = 3
#: Seconds; what differs by less cannot be told from noise.
LEAST = 1e-3


def share(with_it: Sequence[float], without: Sequence[float], step: float) -> float:
    """Returns how much longer a step takes with a change, as a share; 0.0 where that is no more than replays vary.

    Replays, not steps before and after: those may take longer for reasons of their own, such as longer sequences.

    Args:
        with_it: Seconds that replays of a step took with the change.
        without: Seconds of replays of the same step without it.
        step: Seconds of a step as it runs, with the change; 0.0 where none was seen. What the optimizer and the data
            take, a replay has no part in.
    """
    extra = median(with_it) - median(without)
    if extra < LEAST or min(with_it) <= max(without):
        return 0.0
    return extra / max(median(without), step - extra)
