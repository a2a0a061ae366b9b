"""Tells which calls ask for a half dtype by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Methods named after the dtype they give.
METHODS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


def dtypes_asked(func: Callable[..., Any], args: Any, kwargs: Any) -> set[torch.dtype]:
    """The dtypes that a call names."""
    asked = {value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)}
    return asked | {METHODS[func]} if func in METHODS else asked
