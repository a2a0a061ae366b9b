"""An op's facts are what its operands held, what they allow its result to be, and what its dtype made of constants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ampscope.analysis import rounding
from ampscope.analysis.step_graph import StepGraph, operands_of
from ampscope.provenance import op_name
from ampscope.trace.dtypes import FINFO, PARTS
from ampscope.trace.schema import COLLECTIVE_LIBRARIES, ENTRY_NODES, SINK_NODES, EdgeRow, OpRow, Phase, SiteRow

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
    return math.prod(int(size) for size in shape.split("x") if size.isdigit())


def not_zero(op: str, tensors: int) -> slice:
    """Returns the operands that an op divides by, or takes the logarithm, root or reciprocal of, as a slice.

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
        """The exponent of a power, the lowest of a tensor of them; None when it was not measured."""
        given = next((value for name, value in self.numbers() if name == "exponent"), None)
        is_tensor = len(self.edges) > 1 or "self" in self.scalars
        return self._range(self.edges[-1]).low if given is None and is_tensor and self.edges else given

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

    def carries(self, scale: float) -> bool:
        """Whether an op of backward computes with a gradient that is multiplied by the loss scale.

        A derivative that the loop takes to compute its loss from is not, unless of something that was multiplied by it.
        """
        if not self._is_read_by_forward():
            return True
        seen, front = {self.seq}, [self]
        while front:
            op = front.pop()
            if op.name == "mul" and (scale in dict(op.numbers()).values() or (scale, scale) in op.ranges):
                return True
            before = [Executed(self.graph, edge.from_seq) for edge in op.edges if edge.from_seq not in seen]
            front += [each for each in before if each.site.phase == Phase.BACKWARD]
            seen.update(each.seq for each in before)
        return False

    def _is_read_by_forward(self) -> bool:
        seen, front = {self.seq}, [self.seq]
        while front:
            for edge in self.graph.readers[front.pop()]:
                site = self.graph.site(edge.seq)
                if site.phase in (Phase.FORWARD, Phase.LOSS) and site.op not in SINK_NODES:
                    return True
                if edge.seq not in seen:
                    seen.add(edge.seq)
                    front.append(edge.seq)
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


#: Positions of the two factors of ops that sum products; what comes before them is added.
_FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "convolution": (0, 1)}
#: In the names of ops whose results may be far larger than products of their operands.
_STEEP = ("div", "exp", "pow", "prod", "cosh", "sinh", "tan", "gamma", "reciprocal", "sqrt", "norm_backward", "log")


def is_out_of_reach(op: Executed) -> bool:
    """Whether no sum of products of four numbers each leaves the range, for all operands are so small.

    Something else is the matter then, such as a norm of zeros inside a fused op.
    """
    if op.dtype not in rounding.LARGEST or op.dtype == "float64" or any(word in op.name for word in _STEEP):
        return False  # extremes are recorded in float32
    sizes = [each.magnitude for each in op.ranges]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return False
    largest = max(1.0, *known, *(abs(value) for _, value in op.numbers()))
    terms = max((numel(shape) for shape in op.site.in_shapes), default=1)
    return 4 * math.log2(largest) + math.log2(max(1, terms)) < math.log2(rounding.LARGEST[op.dtype])


def cannot_overflow(op: Executed) -> bool:
    """Whether the operands, as they were when they were written, are too small for the result to leave its dtype."""
    most, limit = largest_possible(op), rounding.LARGEST.get(op.dtype)
    return most is not None and limit is not None and most < limit / 2


def largest_possible(op: Executed) -> float | None:
    """The largest magnitude that sums, products and sums of products can come to; None for other ops.

    Also None where an operand was not measured, was not finite, or is larger than a trace can say.
    """
    sizes = {edge.arg: each.magnitude for edge, each in zip(op.edges, op.ranges, strict=True) if each.finite}
    largest = {arg: size for arg, size in sizes.items() if size is not None and size < FINFO["float32"].max}
    if len(largest) != len(op.site.in_dtypes) or not largest:
        return None
    scalar = max([1.0, *(abs(value) for _, value in op.numbers())])
    if op.name in ("add", "sub", "rsub"):
        return (sum(largest.values()) + scalar) * scalar
    if op.name == "mul":
        product = scalar
        for size in largest.values():
            product *= size
        return product
    return _sum_of_products(op, largest, scalar) if op.name in _FACTORS else None


def _sum_of_products(op: Executed, largest: dict[int, float], scalar: float) -> float | None:
    first, second = _FACTORS[op.name]
    if first not in largest or second not in largest:
        return None
    terms = _terms(op, first, second)
    added = sum(size for arg, size in largest.items() if arg not in (first, second))
    return (largest[first] * largest[second] * terms + added) * scalar


def _terms(op: Executed, first: int, second: int) -> int:
    """How many products are summed for one element of the result."""
    if op.name == "convolution":
        weight = op.site.in_shapes[second]
        return numel(weight) // max(1, int(weight.split("x")[0]))
    return int(op.site.in_shapes[first].rsplit("x", 1)[-1])


#: Ops that give zeros where one of their operands holds nothing else; others need all of them to.
_PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot"})
_OF_ZEROS = frozenset({"div", "true_divide"})
_FILLS = frozenset({"zeros_like", "new_zeros", "zeros", "zero", "full_like", "new_full", "full", "fill"})


def divides_by_given_zeros(op: Executed) -> bool:
    """Whether the divisor of an op was zero throughout, for its own operands were, back to the optimizer's first."""
    divisors = {edge.arg for edge in op.divisors}
    wanted = [edge for edge in operands_of(op.graph, op.seq, op.result.out) if edge.arg in divisors]
    return bool(wanted) and all(_are_given_zeros(op.graph, edge, set()) for edge in wanted)


def _are_given_zeros(graph: StepGraph, edge: EdgeRow, seen: set[tuple[int, int]]) -> bool:
    row = graph.producer(edge)
    if not (edge.min == edge.max == 0.0 if edge.partial else row.min == row.max == 0.0):
        return False
    site, at = graph.site(edge.from_seq), (edge.from_seq, edge.from_out)
    if site.op in ENTRY_NODES or site.phase != Phase.OPTIMIZER or at in seen:
        return True
    seen.add(at)
    op = Executed(graph, edge.from_seq)
    if op.name in _FILLS:
        return True
    given = sorted(operands_of(graph, op.seq, edge.from_out), key=lambda each: each.arg)
    zeros = (_are_given_zeros(graph, each, seen) for each in (given[:1] if op.name in _OF_ZEROS else given))
    return any(zeros) if op.name in _PRODUCTS else bool(given) and all(zeros)


#: Ops that add a small constant or bound their operand.
_KEEPS_AWAY = frozenset({"add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "maximum", "threshold"})
#: Ops whose result may be smaller than any operand.
_SHRINKS = frozenset("mul pow square exp _to_copy sigmoid _softmax div prod cumprod exp2 erfc".split())  # noqa: SIM905  # a word list
#: Those that are zero in any dtype of operands below the second number, where float32 ends.
_EXPONENTIALS, _LOWEST_EXPONENT = frozenset({"exp", "exp2", "sigmoid"}), -103.0


class RoundedConstant(NamedTuple):
    """A constant that its dtype rounded away."""

    value: float
    becomes: float
    dtype: str
    seq: int


def rounded_constant(op: Executed) -> RoundedConstant | None:
    """A small constant (or a bound just below 1) that was to keep the divisor from zero and was rounded away."""
    return next((lost for each in op.upstream() if (lost := _rounded_here(each))), None)


def flushed_by(op: Executed) -> Executed | None:
    """The nearest op upstream that made a zero of operands without any, in a dtype too small for the result."""
    return next((each for each in op.upstream() if _flushes(each)), None)


def divides_by_what_was_zero(op: Executed) -> bool:
    """Whether a divisor is zero that no op of the step made so: each zero upstream came of another, in any dtype."""
    if not op.divides_by_zero:
        return False
    above = [each for each in op.upstream() if each.seq != op.seq and each.result.statistics.zeros]
    return bool(above) and not any(_makes_zero(each) for each in above)


def _makes_zero(op: Executed) -> bool:
    """Whether there is a zero in its result, and none in what it read."""
    read = [op.graph.producer(edge) for edge in op.edges if not edge.partial]
    return bool(read) and not any(row.min is not None and row.statistics.zeros for row in read)


def _rounded_here(op: Executed) -> RoundedConstant | None:
    if op.dtype not in rounding.EPSILON:
        return None
    if op.site.cast and op.result.numel == 1:
        return _cast_here(op)
    if op.name not in _KEEPS_AWAY:
        return None
    for name, value in op.numbers():
        if name != "alpha" and rounding.vanishes(value, op.dtype) and _spans(op, 0.0):
            return RoundedConstant(value, 0.0, op.dtype, op.seq)
        if op.name.startswith("clamp") and rounding.rounds_to_one(value, op.dtype) and _spans(op, 1.0):
            return RoundedConstant(value, 1.0, op.dtype, op.seq)
    return None


def _cast_here(op: Executed) -> RoundedConstant | None:
    """A constant kept in a tensor of one element, which the cast to a smaller dtype makes zero."""
    value = op.largest_operand
    lost = value is not None and rounding.vanishes(value, op.dtype)
    return RoundedConstant(value, 0.0, op.dtype, op.seq) if lost and value is not None else None


def _spans(op: Executed, value: float) -> bool:
    """Whether the result may hold ``value``; what was not measured may."""
    low, high = op.result.min, op.result.max
    return low is None or high is None or not (low > value or high < value)


def _flushes(op: Executed) -> bool:
    if op.name not in _SHRINKS or op.dtype != "float16" or not op.result.statistics.zeros:
        return False
    if op.graph.bad_inputs(op.seq) or op.infinite_constant is not None:
        return False  # a number over an infinity is zero
    if any(value == 0 for _, value in op.numbers()):
        return False  # so is a product with zero
    read = [op.graph.producer(edge) for edge in op.edges if not edge.partial]
    if not read or any(row.min is None or row.statistics.zeros != 0 for row in read):
        return False
    return op.name not in _EXPONENTIALS or min(row.min or 0.0 for row in read) > _LOWEST_EXPONENT
