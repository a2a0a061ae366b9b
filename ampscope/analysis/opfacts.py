"""Questions about one executed op: what its operands held, and what its dtype made of the constants it was given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ampscope.analysis import rounding
from ampscope.analysis.stepgraph import StepGraph
from ampscope.trace.schema import EdgeRow, OpRow, SiteRow

#: How many ops back a constant is looked for that should have kept an operand away from zero.
REACH = 8
#: Position of the divisor among the operands of ops that divide by one of several.
_DIVISOR = {"div": 1, "true_divide": 1, "floor_divide": 1, "fmod": 1, "remainder": 1, "addcdiv": 2}
#: Ops that add a small constant or bound their operand.
_KEEPS_AWAY = frozenset({"add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "maximum", "threshold"})
#: Ops whose result may be smaller than any operand.
_SHRINKS = frozenset("mul pow square exp _to_copy sigmoid _softmax div prod exp2 erfc".split())  # noqa: SIM905  # a word list


class Range(NamedTuple):
    """Lowest and highest value of an operand (NaN in both if any element is NaN); None where not measured."""

    low: float | None
    high: float | None

    @property
    def magnitude(self) -> float | None:
        """Largest finite magnitude of the two ends."""
        ends = [abs(end) for end in self if end is not None and math.isfinite(end)]
        return max(ends, default=None)


class LostConstant(NamedTuple):
    """A constant that its dtype rounded away."""

    value: float
    becomes: float
    dtype: str
    seq: int


def base_name(op: str) -> str:
    """``div`` for ``aten.div.Tensor``, ``addcdiv`` for ``aten.addcdiv_.default``."""
    return (op.split(".")[1] if "." in op else op).rstrip("_")


def numel(shape: str) -> int:
    """Elements of a shape such as ``8x128``."""
    return math.prod(int(size) for size in shape.split("x")) if shape else 1


class Executed:
    """One executed op of a traced step.

    Args:
        graph: The step.
        seq: Which op.
    """

    def __init__(self, graph: StepGraph, seq: int) -> None:
        self.graph = graph
        self.seq = seq
        self.site: SiteRow = graph.site(seq)
        self.name = base_name(self.site.op)
        self.dtype = next(iter(self.site.out_dtypes), "")
        self.scalars: dict[str, Any] = graph.scalars(seq)

    @property
    def edges(self) -> list[EdgeRow]:
        """The operands in order."""
        return sorted(self.graph.inputs[self.seq], key=lambda edge: edge.arg)

    @property
    def ranges(self) -> list[Range]:
        """Range of each operand."""
        return [self._range(edge) for edge in self.edges]

    def _range(self, edge: EdgeRow) -> Range:
        if edge.partial:
            return Range(edge.min, edge.max)
        row = self.graph.producer(edge)
        return Range(row.min, row.max)

    @property
    def largest_operand(self) -> float | None:
        """Largest finite magnitude among the operands."""
        return max((r.magnitude for r in self.ranges if r.magnitude is not None), default=None)

    @property
    def lowest_operand(self) -> float | None:
        """Lowest value among the operands."""
        return min((r.low for r in self.ranges if r.low is not None), default=None)

    @property
    def result(self) -> OpRow:
        """Its first non-finite output, or its first."""
        return self.graph.bad_output(self.seq) or self.graph.outputs[self.seq][0]

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Its numeric arguments by name."""
        for name, value in self.scalars.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name, float(value)

    @property
    def exponent(self) -> float:
        """The exponent of a power; 1 when it is a tensor."""
        return next((value for _, value in self.numbers()), 1.0)

    @property
    def literal_too_large(self) -> float | None:
        """A finite constant that does not fit the op's dtype."""
        if self.dtype not in rounding.LARGEST:
            return None
        return next((value for _, value in self.numbers() if rounding.overflows(value, self.dtype)), None)

    @property
    def infinite_constant(self) -> float | None:
        """A constant that is infinite on purpose; a trace writes those as text, which JSON has no number for."""
        return next((float(value) for value in self.scalars.values() if str(value) in ("inf", "-inf")), None)

    @property
    def gives_nan(self) -> bool:
        """Whether an output holds a NaN, not only infinities."""
        return self.result.min is not None and math.isnan(self.result.min)

    @property
    def divides_by_zero(self) -> bool:
        """Whether what it divides by (or takes the reciprocal of) contains a zero."""
        position = _DIVISOR.get(self.name, 0)
        edge = next((edge for edge in self.edges if edge.arg == position), None)
        if edge is None:
            return any(value == 0 for _, value in self.numbers())
        low, high = self._range(edge)
        if low is None or high is None or not low <= 0 <= high:
            return False
        return 0 in (low, high) or bool(self.graph.producer(edge).zeros)

    def lost_constant(self) -> LostConstant | None:
        """A small constant (or a bound just below 1) upstream that its dtype rounded away."""
        return next((lost for op in self.upstream() if (lost := op._loses())), None)

    def flushed(self) -> Executed | None:
        """The nearest op upstream that made a zero of operands without any, in a dtype too small for the result."""
        return next((op for op in self.upstream() if op._flushes()), None)

    def upstream(self) -> Iterator[Executed]:
        """The op itself and those it depends on, nearest first, at most `REACH` ops back."""
        seen, front = {self.seq}, [self.seq]
        for _ in range(REACH):
            yield from (Executed(self.graph, seq) for seq in front)
            sources = (edge.from_seq for seq in front for edge in self.graph.inputs[seq])
            front = [seq for seq in dict.fromkeys(sources) if seq not in seen]
            seen.update(front)

    def _loses(self) -> LostConstant | None:
        if self.dtype not in rounding.EPSILON or self.name not in _KEEPS_AWAY:
            return None
        for name, value in self.numbers():
            if name != "alpha" and rounding.vanishes(value, self.dtype):
                return LostConstant(value, 0.0, self.dtype, self.seq)
            if self.name.startswith("clamp") and rounding.rounds_to_one(value, self.dtype):
                return LostConstant(value, 1.0, self.dtype, self.seq)
        return None

    def _flushes(self) -> bool:
        if self.name not in _SHRINKS or self.dtype != "float16" or not self.result.zeros:
            return False
        producers = [self.graph.producer(edge) for edge in self.edges if not edge.partial]
        return bool(producers) and all(row.zeros == 0 for row in producers if row.min is not None)
