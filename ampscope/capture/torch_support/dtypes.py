"""Torch's dtypes by the names that the trace has for them."""

from __future__ import annotations

import torch

from ampscope.trace.dtypes import HALF_DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float16`` for ``float16``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


#: The half-precision dtypes.
HALF = frozenset(map(torch_dtype, HALF_DTYPES))
