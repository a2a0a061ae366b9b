"""Non-finite values may be born and reach no sink: harmless, absorbed by a division, or taken for numbers.

The trace of a step shows where the code itself took an overflow for a number (``nan_to_num``, ``where(isfinite(x),
...)``, ``clamp``). Whether that did harm, it does not: a mask, a bound that any large number would have come to, and a
value that nobody needs look the same. The same step in float32 tells them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from ampscope.provenance.graph import Graph, has_nan, is_finite, op_name
from ampscope.provenance.lost_values import Counterparts
from ampscope.provenance.walk import Origin, is_deliberate, only_minus_infinity, path_along
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, EdgeRow, Node, OpRow, Phase, SiteRow, Statistics

#: Ops after which an infinity is gone and has taken information with it: 1 / inf is 0, whatever was meant.
_DIVIDES = ("rsqrt", "reciprocal", "div")
#: Ops that divide by the root of a running variance, their last operand, except in training.
_BY_VARIANCE = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit_no_training"}
)
#: Ops whose result can exceed the range of its dtype although the operands were finite.
_GROWS = ("mul", "pow", "square", "exp", "mm", "matmul", "linear", "conv", "sum", "add", "cumsum", "norm", "mean")
#: Ops that leave the range so steeply that the reciprocal of what they left is as good as zero.
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "cosh", "sinh"})


def absorbed(graph: Graph, among: Iterable[int] | None = None) -> list[Origin]:
    """Overflows that no sink shows because a division turned them into zeros.

    An overflow that a saturating function receives (tanh, sigmoid, softmax, clamp) gives the right result and is not
    one of these; nor is an exponential whose reciprocal is taken: 1 / (1 + exp(x)) is zero there, as it should be.

    Args:
        graph: The step.
        among: The ops that are looked at; all by default.
    """
    found = []
    for seq in sorted(graph.outputs if among is None else among):
        row = graph.bad_output(seq)
        if row is None or has_nan(row) or graph.bad_inputs(seq) or not _can_overflow(graph.site(seq)):
            continue
        path = _to_division(graph, seq)
        if path and not is_deliberate(graph, seq):
            found.append(Origin(seq, row.out, path, path[-1]))
    return found


def reaches_loss(graph: Graph, seq: int) -> bool:
    """Whether a loss was computed from what an op gave."""
    return reaches(graph, seq, (Node.LOSS,))


def reaches(graph: Graph, seq: int, sinks: Collection[Node]) -> bool:
    """Whether one of some kinds of sinks was computed from what an op gave."""
    seen, queue = {seq}, [seq]
    while queue:
        for edge in graph.readers[queue.pop()]:
            if graph.site(edge.seq).op in sinks:
                return True
            if edge.seq not in seen:
                seen.add(edge.seq)
                queue.append(edge.seq)
    return False


def _can_overflow(site: SiteRow) -> bool:
    name = op_name(site.op)
    forward = site.phase in (Phase.FORWARD, Phase.LOSS)
    if site.op == Node.CARRIED:
        return True  # an infinity that an earlier step left
    return forward and site.op not in ENTRY_NODES and (any(word in name for word in _GROWS) or bool(site.cast))


def _to_division(graph: Graph, seq: int) -> tuple[int, ...]:
    """The way from an infinity to the division that swallows it; empty when there is none."""
    towards, queue = {seq: -1}, [seq]
    while queue:
        here = queue.pop(0)
        for edge in graph.readers[here]:
            if edge.seq in towards or graph.site(edge.seq).phase == Phase.BACKWARD or not graph.edge_is_bad(edge):
                continue
            towards[edge.seq] = here
            if _hands_on(graph, edge.seq):
                queue.append(edge.seq)
            elif _swallows(graph, edge) and not _saturates(graph, seq, edge.seq):
                return path_along(towards, edge.seq)[::-1]
    return ()


def _hands_on(graph: Graph, seq: int) -> bool:
    """Whether what an op gave is not finite; the running statistics that it was given are no result of it."""
    if op_name(graph.site(seq).op) not in _BY_VARIANCE:
        return graph.bad_output(seq) is not None
    result = graph.output(seq)
    return not is_finite(result.min, result.max)


def _swallows(graph: Graph, edge: EdgeRow) -> bool:
    name = op_name(graph.site(edge.seq).op)
    if name == "div":
        return edge.arg == 1
    if name in _BY_VARIANCE:
        last = len(graph.site(edge.seq).in_dtypes) - 1
        return edge.arg == last and graph.scalars(edge.seq).get("training") is not True
    if name == "pow":
        return any(isinstance(v, (int, float)) and v < 0 for v in graph.scalars(edge.seq).values())
    return any(word in name for word in _DIVIDES)


def _saturates(graph: Graph, seq: int, division: int) -> bool:
    """Whether an overflow is an exponential's, and the division takes its reciprocal: a constant over it."""
    return op_name(graph.site(seq).op) in _EXPONENTIALS and op_name(graph.site(division).op) != "div"


#: The dtype whose range ends long before float32's does.
_NARROW = "float16"
#: Results whose largest magnitudes differ by less than this share may be roundings of one number,
_ROUNDED = 0.02
#: and so may those of which a smaller share of elements has another exponent.
_MOVED = 0.01


def hidden(graph: Graph) -> list[Origin]:
    """Overflows of float16 that an op made finite numbers of, other than by a division; see `absorbed`.

    Args:
        graph: The ops of a step.

    Returns:
        Each with the way to an op that hid it, which is the ``sink``; one overflow may be hidden by several.
    """
    divided = {origin.seq for origin in absorbed(graph)}
    found = []
    for seq in sorted(graph.outputs):
        row = graph.bad_output(seq)
        if row is not None and seq not in divided and _overflows(graph, seq, row):
            found += [Origin(seq, row.out, path, path[-1]) for path in _ways(graph, seq)]
    return found


def hidden_beside(half: Graph, wide: Graph) -> list[Origin]:
    """Finds the hidden overflows for which float32 has other, finite numbers, and that a loss or gradient depends on.

    Args:
        half: The step as it was, with every statistic.
        wide: The same step in float32, with every statistic.

    Returns:
        Each once, with the first op that hid it.
    """
    there = Counterparts(half, wide)
    found: dict[int, Origin] = {}
    for each in hidden(half):
        born = half.output(each.seq, each.out)
        if each.seq not in found and _fits(born, there.of(each.seq, each.out)) and _differs(half, there, each.sink):
            found[each.seq] = each
    return [each for each in found.values() if reaches(half, each.sink, (Node.LOSS, Node.GRADIENT))]


def _overflows(graph: Graph, seq: int, row: OpRow) -> bool:
    site = graph.site(seq)
    if site.op in ENTRY_NODES or site.op in SINK_NODES or site.phase == Phase.OPTIMIZER:
        return False
    narrow = site.out_dtypes[row.out : row.out + 1] == (_NARROW,)
    return narrow and not graph.bad_inputs(seq) and not graph.is_cut(seq) and not is_deliberate(graph, seq)


def _ways(graph: Graph, seq: int) -> Iterator[tuple[int, ...]]:
    """The ways from what is not finite to the ops whose results are, in the order in which these ran."""
    towards, queue, ends = {seq: -1}, [seq], []
    while queue:
        here = queue.pop(0)
        for edge in graph.readers[here]:
            if edge.seq in towards or edge not in graph.bad_inputs(edge.seq):
                continue
            towards[edge.seq] = here
            if graph.bad_output(edge.seq) is not None:
                queue.append(edge.seq)
            elif any(dtype != "bool" for dtype in graph.site(edge.seq).out_dtypes):  # a comparison only looks
                ends.append(edge.seq)
    for end in sorted(ends):
        yield path_along(towards, end)[::-1]


def _fits(born: OpRow, there: OpRow | None) -> bool:
    """Whether float32 has numbers for more of the elements."""
    return there is not None and _not_finite(born.statistics) > _not_finite(there.statistics)


def _not_finite(seen: Statistics) -> int:
    return sum(count or 0 for count in (seen.nan, seen.posinf, seen.neginf))


def _differs(half: Graph, counterparts: Counterparts, seq: int) -> bool:
    """Whether what hid an infinity gave other numbers than float32 has there; where that did not run, it did."""
    here, there = half.output(seq), counterparts.of(seq, 0)
    if there is None:
        return True
    if not is_finite(there.min, there.max):
        return False
    one, other = here.statistics, there.statistics
    largest = max(one.max_finite or 0.0, other.max_finite or 0.0)
    apart = abs((one.max_finite or 0.0) - (other.max_finite or 0.0)) > _ROUNDED * largest
    return apart or _moved(one, other) > _MOVED * here.numel


def _moved(one: Statistics, other: Statistics) -> float:
    """How many elements have other exponents, or are zero on one side alone."""
    ours, theirs = _counts(one), _counts(other)
    return sum(abs(ours.get(place, 0) - theirs.get(place, 0)) for place in ours.keys() | theirs.keys()) / 2


def _counts(seen: Statistics) -> dict[int | None, int]:
    """Elements by exponent; under None those that are zero."""
    counts: dict[int | None, int] = {None: seen.zeros or 0}
    if seen.exp_low is not None and seen.exp_counts is not None:
        counts |= dict(enumerate(seen.exp_counts, seen.exp_low))
    return counts


#: Ops that choose between values: what they leave out is gone, whatever it was.
_SELECTS = frozenset({"where", "masked_fill", "nan_to_num", "clamp", "clamp_min", "clamp_max", "threshold_backward"})
#: Ops whose results are elements of their operands: what they do not take is gone, too.
_TAKES = frozenset(
    {
        *("min", "max", "amin", "amax", "minimum", "maximum", "fmin", "fmax", "relu", "hardtanh", "topk", "sort"),
        *("index", "index_select", "gather", "masked_select", "slice", "select", "narrow", "take"),
    }
)
#: Ops that read -inf as "not this one".
_READS_MASKS = frozenset({"_softmax", "_log_softmax", "exp", "logsumexp", "max", "amax", "topk"})

#: Functions that have a finite limit at an infinity, and are as good as there long before any dtype ends.
_SATURATES = frozenset(
    {"tanh", "sigmoid", "erf", "hardtanh", "hardsigmoid", "relu6", "atan", "clamp", "clamp_min", "clamp_max"}
)


class Harmless(StrEnum):
    """The reasons why a non-finite value is left alone."""

    MASK = "mask"  #: -inf (or inf) written on purpose, as in a mask, and gone before anything that matters
    SATURATED = "saturated"  #: an infinity that a bounded function took to the limit that any large number has there
    MASKED = "masked"  #: born where nobody looks: masked, or replaced, before anything that matters
    UNUSED = "unused"  #: reaches no loss, gradient, weight or buffer: a metric, a log


class Birth(NamedTuple):
    """A non-finite value born in a step, and why it is harmless."""

    seq: int
    why: Harmless


def harmless_births(graph: Graph, among: Iterable[int] | None = None) -> Iterator[Birth]:
    """The ops that made a non-finite value of finite operands without any sink being the worse for it, in order.

    Args:
        graph: The step.
        among: The ops that are looked at; all by default.
    """
    asked = sorted(graph.outputs if among is None else among)
    born = [seq for seq in asked if _is_born(graph, seq)]
    if born:
        harmful = _told_by_a_sink(graph).union(origin.seq for origin in absorbed(graph, born))
        yield from (Birth(seq, _why(graph, seq)) for seq in born if seq not in harmful)


def is_discarded(graph: Graph, seq: int) -> bool:
    """Whether forward went on without the non-finite values of an op: all that it made of them took other elements."""
    seen, front, left_by = {seq}, [seq], set()
    while front:
        for edge in graph.readers[front.pop()]:
            site = graph.site(edge.seq)
            forward = site.phase in (Phase.FORWARD, Phase.LOSS) and site.op not in SINK_NODES
            if edge.seq in seen or not forward or not graph.edge_is_bad(edge):
                continue
            seen.add(edge.seq)
            if graph.bad_output(edge.seq) is not None:
                front.append(edge.seq)
            elif any("float" in dtype for dtype in site.out_dtypes):  # a comparison only looks
                left_by.add(op_name(site.op))
    return bool(left_by) and left_by <= _SELECTS | _TAKES


def _told_by_a_sink(graph: Graph) -> set[int]:
    """The ops whose non-finite values reach a sink: walked back to once, and not from each op on."""
    found = set(graph.sinks())
    queue = list(found)
    while queue:
        for edge in graph.inputs[queue.pop()]:
            before = edge.from_seq
            if before not in found and graph.bad_output(before) is not None and graph.edge_is_bad(edge):
                found.add(before)
                queue.append(before)
    return found


def _is_born(graph: Graph, seq: int) -> bool:
    if graph.bad_output(seq) is None or graph.is_cut(seq) or (site := graph.site(seq)).op in SINK_NODES:
        return False
    return is_deliberate(graph, seq) or (site.op not in ENTRY_NODES and not graph.bad_inputs(seq))


def _why(graph: Graph, seq: int) -> Harmless:
    """Returns the reason why a non-finite value that reaches no sink does no harm."""
    seen, queue = {seq}, [seq]
    swallowed: set[str] = set()  # names of the ops that made something finite of it
    while queue:
        here = queue.pop(0)
        for edge in graph.readers[here]:
            if edge.seq in seen or not graph.edge_is_bad(edge):
                continue
            seen.add(edge.seq)
            if graph.bad_output(edge.seq) is not None:
                queue.append(edge.seq)
            elif _passes_on(graph, edge.seq):
                swallowed.add(op_name(graph.site(edge.seq).op))
    if is_deliberate(graph, seq) or (only_minus_infinity(graph, seq) and swallowed & _READS_MASKS):
        return Harmless.MASK
    born = graph.bad_output(seq)
    if swallowed and swallowed <= _SATURATES and born is not None and not has_nan(born):
        return Harmless.SATURATED
    return Harmless.MASKED if swallowed or graph.site(seq).phase == Phase.BACKWARD else Harmless.UNUSED


def _passes_on(graph: Graph, seq: int) -> bool:
    """Whether a finite result that an op made of a non-finite operand is read by anything."""
    return bool(graph.readers[seq]) or op_name(graph.site(seq).op) in _SELECTS
