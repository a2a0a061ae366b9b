"""What the steps show of gradients that were clipped while they still carried the loss scale."""

from __future__ import annotations

from ampscope.analysis.overview.overview import Overview
from ampscope.report.numbers import value

#: Norms that differ by at most this share are one and the same threshold.
_SAME = 0.02


def clipped_norm(seen: Overview, first: int) -> str:
    """That all gradients have one norm, the threshold divided by the loss scale; empty where they have not.

    Args:
        seen: The run's steps.
        first: The step from which on they were clipped so.
    """
    norms = [norm for step, norm in zip(seen.grad_norm.steps, seen.grad_norm.values, strict=True) if step >= first]
    scales = [power for step, power in zip(seen.log2_scale.steps, seen.log2_scale.values, strict=True) if step >= first]
    if not norms or not scales or min(scales) != max(scales) or not 0 < max(norms) <= (1 + _SAME) * min(norms):
        return ""
    scale = 2.0 ** scales[0]
    threshold = float(f"{max(norms) * scale:.3g}")  # as it was written: the norm has been rounded
    return (
        f"Every step had the same gradient norm, {value(max(norms))}, which is {value(threshold)} divided by "
        f"the loss scale of {value(scale)}: what was clipped to the threshold was {value(scale)} times the gradient."
    )
