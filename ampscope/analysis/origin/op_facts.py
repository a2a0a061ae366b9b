"""Questions about one executed op: what its operands held, and what its dtype made of the constants it was given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ampscope.analysis.numerics import rounding
from ampscope.analysis.origin.step_graph import StepGraph
from ampscope.provenance import op_name
from ampscope.trace.dtypes import PARTS
from ampscope.trace.schema import COLLECTIVE_LIBRARIES, EdgeRow, OpRow, Phase, SiteRow

#: How many ops back a constant is looked for that should have kept an operand away from zero.
REACH = 8
#: Position of the divisor among the operands of ops that divide by one of several.
_DIVISOR = {"div": 1, "true_divide": 1, "floor_divide": 1, "fmod": 1, "remainder": 1, "addcdiv": 2}
_DIVIDES = frozenset({*_DIVISOR, "reciprocal", "rsqrt", "pow"})


#: Ops that give NaN for finite numbers only where they divide by zero.
_QUOTIENTS = frozenset({"div", "true_divide", "floor_divide", "fmod", "remainder"})


#: Ops that are infinite only at the edge of where they are defined.
LOGARITHMS = frozenset({"log", "log2", "log10", "log1p", "xlogy", "special_xlog1py", "logit"})


class Range(NamedTuple):
    """Lowest and highest value of an operand (NaN in both if any element is NaN); None where not measured."""

    low: float | None
    high: float | None

    @property
    def finite(self) -> bool:
        """Whether it was measured and both ends are finite."""
        return all(end is not None and math.isfinite(end) for end in self)

    @property
    def magnitude(self) -> float | None:
        """Largest finite magnitude of the two ends."""
        ends = [abs(end) for end in self if end is not None and math.isfinite(end)]
        return max(ends, default=None)


def numel(shape: str) -> int:
    """Elements of a shape such as ``8x128``."""
    return math.prod(int(size) for size in shape.split("x")) if shape else 1


def not_zero(op: str, tensors: int) -> slice:
    """Which of an op's operands it divides by, or takes the logarithm, root or reciprocal of.

    Args:
        op: Its whole name.
        tensors: How many it gives: an op over lists has one in each group of operands.
    """
    count = tensors if "_foreach_" in op else 1
    first = _DIVISOR.get(op_name(op), 0) * count
    return slice(first, first + count)


def divides(op: str) -> bool:
    """Whether an op divides by one of its operands, or may, as a power does."""
    return op_name(op) in _DIVIDES


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
        self.name = op_name(self.site.op)
        given = next(iter(self.site.out_dtypes), "")
        self.is_complex = given in PARTS
        self.dtype = PARTS.get(given, given)  #: of its first output; of complex numbers, that of their parts
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
    def exponent(self) -> float | None:
        """The exponent of a power; None when it is a tensor."""
        return next((value for _, value in self.numbers()), None)

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
    def communicates(self) -> bool:
        """Whether its result is, in part, what other ranks have sent."""
        return self.site.op.partition(".")[0] in COLLECTIVE_LIBRARIES

    @property
    def gives_nan(self) -> bool:
        """Whether an output holds a NaN, not only infinities."""
        return self.result.min is not None and math.isnan(self.result.min)

    @property
    def divisors(self) -> list[EdgeRow]:
        """The operands that an op divides by, or takes the logarithm, root or reciprocal of: those not to be zero.

        An op over lists of tensors has one in each group of operands.
        """
        where = not_zero(self.site.op, len(self.site.out_dtypes))
        return [edge for edge in self.edges if where.start <= edge.arg < where.stop]

    @property
    def divides_by_zero(self) -> bool:
        """Whether what it divides by (or takes the reciprocal of) contains a zero."""
        if not self.divisors:
            return any(value == 0 for _, value in self.numbers())
        return is_zero_by_zero(self) or any(self._has_zero(edge) for edge in self.divisors)

    @property
    def divides_next_to_zero(self) -> bool:
        """Whether its quotient overflows by the smallness of what it divides by, which is no zero.

        So it is if what is divided is at most the root of the largest number: the divisor is below that one's inverse.
        Not in float16, which ends so early that a wider dtype has the quotient; nor of powers, which may be steep.
        """
        limit, by = rounding.LARGEST.get(self.dtype), {edge.arg for edge in self.divisors}
        if limit is None or self.dtype == "float16" or self.name == "pow" or self.gives_nan or self.is_complex:
            return False
        divided = [each.magnitude for edge, each in zip(self.edges, self.ranges, strict=True) if edge.arg not in by]
        return all(size is not None and size <= math.sqrt(limit) for size in divided)

    def _has_zero(self, edge: EdgeRow) -> bool:
        """Whether an operand holds a zero; a complex number is one if both its parts are."""
        low, high = self._range(edge)
        if low is None or high is None or not low <= 0 <= high:
            return False
        at_an_end = 0 in (low, high) and (low == high or operand_dtype(self, edge) not in PARTS)
        return at_an_end or bool(self.graph.producer(edge).statistics.zeros)

    @property
    def depends_on_gradient(self) -> bool:
        """Whether an op of backward computes with the gradient it was handed.

        One that does not makes a factor of what forward left, which another op of the same node multiplies with it.
        """
        readers = (Executed(self.graph, edge.seq) for edge in self.graph.readers[self.seq])
        if not any(reader.site.phase == Phase.BACKWARD and reader._same_node(self) for reader in readers):
            return True
        seen, front = {self.seq}, [self]
        while front:
            op = front.pop()
            for edge in op.edges:
                source = Executed(self.graph, edge.from_seq)
                if source.name == "ones_like" or (source.site.phase == Phase.BACKWARD and not source._same_node(self)):
                    return True
                if source.site.phase == Phase.BACKWARD and source.seq not in seen:
                    seen.add(source.seq)
                    front.append(source)
        return False

    def _same_node(self, other: Executed) -> bool:
        """Whether two ops of backward belong to the gradient of one forward op."""
        mine, theirs = self.site, other.site
        return (mine.grad_fn, mine.forward_site) == (theirs.grad_fn, theirs.forward_site)

    def upstream(self) -> Iterator[Executed]:
        """The op itself and those that its divisor depends on, nearest first, at most `REACH` ops back."""
        yield self
        seen = {self.seq}
        front = [edge.from_seq for edge in self.divisors]
        for _ in range(REACH):
            front = [seq for seq in dict.fromkeys(front) if seq not in seen]
            seen.update(front)
            yield from (Executed(self.graph, seq) for seq in front)
            front = [edge.from_seq for seq in front for edge in self.graph.inputs[seq]]


def operand_dtype(op: Executed, edge: EdgeRow) -> str:
    """The dtype of an operand; empty where the trace does not say."""
    return next(iter(op.site.in_dtypes[edge.arg : edge.arg + 1]), "")


def is_zero_by_zero(op: Executed) -> bool:
    """Whether only 0 / 0 explains the result: a quotient of finite real numbers that is NaN.

    Zeros in the midst of a large operand may be in none of the sampled places.
    """
    quotient = op.name in _QUOTIENTS and not op.is_complex
    return quotient and op.gives_nan and all(each.finite for each in op.ranges)


class Unmeasured(NamedTuple):
    """An operand of which the trace has no values."""

    arg: int
    dtype: str
    shape: str


def unmeasured(op: Executed) -> Unmeasured | None:
    """The first operand with any elements of which the trace has no values; None where it has those of all."""
    unseen = [edge.arg for edge, each in zip(op.edges, op.ranges, strict=True) if each.low is None]
    given = list(zip(op.site.in_dtypes, op.site.in_shapes, strict=False))
    missing = (Unmeasured(arg, *given[arg]) for arg in unseen if arg < len(given))
    return next((each for each in missing if numel(each.shape)), None)
