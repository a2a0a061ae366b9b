"""Says why an op that only changes the dtype ran."""

from __future__ import annotations

import torch

from ampscope.trace.schema import Cast

#: Python-level functions by which a user asks for another dtype.
_CONVERSIONS = frozenset(
    {"to", "type", "type_as", "half", "float", "double", "bfloat16", "astype", "to_dense", "as_tensor", "tensor"}
)


def cast_reason(
    before: torch.dtype, after: torch.dtype, *, forward: Cast, function: str, autocast: torch.dtype | None
) -> Cast:
    """Why a tensor was cast.

    Args:
        before: Its dtype.
        after: That of the result.
        forward: In backward, why the forward op was a cast: its gradient is cast back for the same reason.
        function: Name of the torch function that the user called.
        autocast: The dtype of the enclosing autocast region; None outside.
    """
    if before == after:
        return Cast.NONE
    if forward:
        return forward
    if function in _CONVERSIONS:
        return Cast.EXPLICIT
    return Cast.AUTOCAST if autocast in (before, after) else Cast.PROMOTION
