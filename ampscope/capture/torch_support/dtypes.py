"""Torch's dtypes by the names that the trace has for them, and which of them a call asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampscope.trace.dtypes import HALF_DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float16`` for ``float16``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


#: The half-precision dtypes.
HALF = frozenset(map(torch_dtype, HALF_DTYPES))
#: Methods named after the dtype they give.
METHODS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


def dtypes_asked(func: Callable[..., Any], args: Any, kwargs: Any) -> set[torch.dtype]:
    """The dtypes that a call names."""
    asked = {value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)}
    return asked | {METHODS[func]} if func in METHODS else asked
