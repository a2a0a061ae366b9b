"""Says which rows of a batch hold values that are not finite."""

from __future__ import annotations

from torch import Tensor

from ampscope.capture.tracing.statistics import stats
from ampscope.capture.tracing.statistics.tensor_values import numbers

#: Rows that are named; of more, only the first.
MOST_ROWS = 16


def bad_rows(tensor: Tensor) -> list[int]:
    """Returns at most `MOST_ROWS` first-dimension indices where ``tensor`` is not finite; waits for the device."""
    if tensor.dim() == 0 or not stats.can_be_bad(tensor) or not stats.measurable(tensor):
        return []
    elements = (tensor if tensor.is_complex() else numbers(tensor)).detach().isfinite()
    bad = ~elements.flatten(1).all(1) if tensor.dim() > 1 else ~elements
    found: list[int] = bad.nonzero().flatten()[:MOST_ROWS].tolist()
    return found
