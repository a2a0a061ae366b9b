"""Torch's dtypes by the names that the trace has for them, and casts of the tensors that a call takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container
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


def cast(value: Any, change: Callable[[Tensor], Tensor], dtypes: Container[torch.dtype]) -> Any:
    """``value`` with its tensors of some dtypes cast; itself where it holds none, so that edits to it last."""
    if isinstance(value, Tensor):
        return change(value) if value.dtype in dtypes else value
    if not holds(value, dtypes):
        return value
    if isinstance(value, tuple):
        items = [cast(item, change, dtypes) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [cast(item, change, dtypes) for item in value]
    if type(value) is dict:
        return {key: cast(item, change, dtypes) for key, item in value.items()}
    return _cast_fields(value, change, dtypes)


def _cast_fields(value: Any, change: Callable[[Tensor], Tensor], dtypes: Container[torch.dtype]) -> Any:
    """A dataclass, or a dict of a class of its own (both at once, as outputs of transformers), with tensors cast."""
    copied = copy.copy(value)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, cast(getattr(value, field.name), change, dtypes))
    if isinstance(value, dict):
        for key, item in value.items():
            dict.__setitem__(copied, key, cast(item, change, dtypes))
    return copied


def holds(value: Any, dtypes: Container[torch.dtype]) -> bool:
    """Whether any tensor in what a call takes or returns is in one of some dtypes."""
    if isinstance(value, Tensor):
        return value.dtype in dtypes
    if isinstance(value, (tuple, list)):
        return any(holds(item, dtypes) for item in value)
    if isinstance(value, dict):
        return any(holds(item, dtypes) for item in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds(getattr(value, field.name), dtypes) for field in dataclasses.fields(value))
    return False
