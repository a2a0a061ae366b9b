"""Finds what the failed op was given, as its faithful replay measured it: dtypes and ends, before autocast's casts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ampscope.capture.replay.cures.forms.call_form import CallPlace
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.provenance import op_name
from ampscope.trace.dtypes import FINFO, PARTS
from ampscope.trace.schema import Cast, Phase

#: Ops back, or forth, within which one that belongs to the failed one is looked for.
REACH = 12
_FORWARD = (Phase.FORWARD, Phase.LOSS, Phase.RECOMPUTE)


class Operand(NamedTuple):
    """One operand of the failed op, as the code gave it."""

    dtype: str  #: of complex numbers, that of their parts
    low: float | None
    high: float | None
    smallest: float | None  #: magnitude that is not zero

    @property
    def is_negative(self) -> bool:
        """Whether it holds a number below zero, as far as it was measured."""
        return self.low is not None and self.low < 0


def operand(call: FailedCall, number: int) -> Operand | None:
    """An operand of the failed op; None where the trace does not say what wrote it.

    Args:
        call: The failed op.
        number: Which one.
    """
    edge = call.edge(number)
    dtype = next(iter(call.site.in_dtypes[number : number + 1]), "")
    while edge is not None and call.graph.site(edge.from_seq).cast == Cast.AUTOCAST:
        dtype = next(iter(call.graph.site(edge.from_seq).in_dtypes), dtype)
        edge = next(iter(call.graph.inputs[edge.from_seq]), None)
    if edge is None:
        return None
    row = call.graph.output(edge.from_seq, edge.from_out)
    low, high = (edge.min, edge.max) if edge.partial else (row.min, row.max)
    return Operand(PARTS.get(dtype, dtype), low, high, row.statistics.min_positive)


def place(call: FailedCall, seq: int) -> CallPlace:
    """The user's line that an op belongs to."""
    site = call.graph.site(seq)
    return CallPlace(site.file, site.line)


def name(call: FailedCall, seq: int) -> str:
    """The name of an op: ``log``."""
    return op_name(call.graph.site(seq).op)


def before(call: FailedCall, seq: int, through: frozenset[str]) -> Iterator[int]:
    """The ops that one depends on, nearest first, through ops of some names only."""
    seen, front = {seq}, [seq]
    for _ in range(REACH):
        found = dict.fromkeys(edge.from_seq for each in front for edge in call.graph.inputs[each])
        found = {each: None for each in found if each not in seen}
        seen.update(found)
        yield from found
        front = [each for each in found if name(call, each) in through]


def after(call: FailedCall, seq: int, through: frozenset[str]) -> Iterator[int]:
    """The ops of the forward that read one, nearest first, through ops of some names only."""
    seen, front = {seq}, [seq]
    for _ in range(REACH):
        found = dict.fromkeys(edge.seq for each in front for edge in call.graph.readers[each])
        found = {each: None for each in found if each not in seen and call.graph.site(each).phase in _FORWARD}
        seen.update(found)
        yield from found
        front = [each for each in found if name(call, each) in through]


def is_masked(call: FailedCall) -> bool:
    """Whether a selection takes the place of some of the op's values at once."""
    readers = after(call, call.seq, frozenset({"_to_copy"}))
    return any(name(call, each) in ("where", "masked_fill") for each in readers)


def smallest_normal(dtype: str) -> float:
    """The smallest power of ten that is a normal number of a dtype."""
    return float(f"1e{math.ceil(math.log10(FINFO[dtype].smallest_normal))}")


def power_of_ten(largest: float) -> float:
    """The largest power of ten that is not above a number."""
    power = math.floor(math.log10(largest))
    return float(f"1e{power}")
