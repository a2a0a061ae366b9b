"""Counts the values that are lost in casts to half precision which a loop makes before its step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.torch_private import storage_key, storage_ref
from ampscope.capture.torch_support.user_line import NOWHERE, Place, program_line, user_place
from ampscope.capture.tracing.distinct.distinct_values import counted, counted_grid
from ampscope.capture.tracing.sites import dtype_name
from ampscope.capture.tracing.statistics import stats
from ampscope.provenance import FEWEST_VALUES
from ampscope.trace.evidence import EarlierCast

#: Functions that give another dtype and change nothing else.
_CASTS = frozenset({"to", "half", "bfloat16", "type", "type_as"})
_GRIDS = frozenset({"arange", "linspace"})
#: Functions whose result holds the values of their operands; where it shares their memory, it is known anyway.
_HANDS_ON = frozenset({"to", "cuda", "clone", "contiguous", "cat", "stack", "reshape", "pin_memory"})
#: Places of casts that are counted.
_MOST = 8


class CastBefore(NamedTuple):
    """A cast to half precision, or a grid made in it, that ran before the step began."""

    counts: Tensor  #: see `distinct_values.counted`
    read: str  #: dtype that it read
    dtype: str  #: dtype that it gave
    place: Place

    def told(self, since: int) -> EarlierCast:
        """The same for the evidence of an incident, with the first step that read what it gave."""
        return EarlierCast(since=since, read=self.read, dtype=self.dtype, source=program_line(self.place))


class CastsBefore:
    """Counts lost values at the first cast of each place, and knows a cast's results while they are alive."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._given: dict[int, tuple[Any, CastBefore]] = {}  # by storage: what keeps that key, the cast

    def called(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A function has run between two steps."""
        name = getattr(func, "__name__", "")
        if type(result) is not Tensor or not (name in _CASTS or name in _GRIDS or (name in _HANDS_ON and self._given)):
            return
        operands = list(tensor_tree.tensors((args, kwargs)))
        if result.dtype in HALF and self._is_counted(name, operands, result):
            return
        for operand in operands:
            cast = self.of(operand)
            if cast is not None:
                self._given[storage_key(result)] = storage_ref(result), cast

    def of(self, tensor: Tensor) -> CastBefore | None:
        """The cast that gave a tensor its values."""
        known = self._given.get(storage_key(tensor)) if self._given and type(tensor) is Tensor else None
        return known[1] if known is not None and not known[0].expired() else None

    def forget(self) -> None:
        """Forgets the casts of the step that has been judged."""
        self._given.clear()

    def _is_counted(self, name: str, operands: list[Tensor], result: Tensor) -> bool:
        """Counts at a place that is new, if what was called is a cast, or made a grid."""
        narrows = name in _CASTS and bool(operands) and operands[0].dtype not in HALF
        if not (narrows or (name in _GRIDS and not operands)) or result.numel() < FEWEST_VALUES:
            return False
        place = user_place() or NOWHERE
        if place in self._places or len(self._places) >= _MOST or not stats.measurable(result):
            return False
        if narrows and (operands[0].dtype is torch.bool or not stats.measurable(operands[0])):
            return False
        self._places.add(place)
        counts = counted(operands[0], result) if narrows else counted_grid(result)
        read = dtype_name(operands[0].dtype) if narrows else ""
        self._given[storage_key(result)] = (
            storage_ref(result),
            CastBefore(counts, read, dtype_name(result.dtype), place),
        )
        return True
