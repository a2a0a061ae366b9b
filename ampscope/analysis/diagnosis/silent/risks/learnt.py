"""Whether gradients vanish because nothing is left to learn."""

from __future__ import annotations

import math

import numpy as np

from ampscope.analysis.tables.step_history import History

#: Gradients fall as a loss does that is learnt: one whose bits fell by this share of theirs explains it.
LEARNT = 0.4


def is_learnt(history: History | None, since: int, until: int, fallen: float) -> bool:
    """Whether the loss falls as the gradients do.

    Args:
        history: The steps of their optimizer.
        since: The step since which they have fallen.
        until: The newest in which they were measured.
        fallen: By how many bits.
    """
    if history is None:
        return False
    begin, end = np.searchsorted(history.step, [since, until + 1])
    losses = history.loss[begin:end]
    losses = losses[np.isfinite(losses)]
    if losses.size < 2 or (losses <= 0).any():
        return bool((losses <= 0).any())
    part = max(1, losses.size // 5)
    lost = math.log2(float(np.median(losses[:part]))) - math.log2(float(np.median(losses[-part:])))
    return lost >= LEARNT * fallen
