"""Half precision that a program asks for itself, out of autocast's reach: its conversions, its half parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ampscope.analysis.results import CodeLine, Tried
from ampscope.analysis.step_graph import StepGraph
from ampscope.analysis.words import listed
from ampscope.cures.rewriting.dtype_words import converted
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, LOSS_CODE, Cast, Change, Node, Phase, SiteRow, Table, Trial

#: Conversions and parameters that are named; more are counted.
NAMED = 3


class HalfWeights(NamedTuple):
    """Holds the qualified names of a model's parameters and buffers that are half precision themselves."""

    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


def half_weights(run: Run, rank: int) -> HalfWeights:
    """The half-precision parameters and buffers of a run's models."""
    half = [row for row in run.rows(Table.PARAMS, rank=rank) if row.dtype in HALF_DTYPES]
    parameters = tuple(row.name for row in half if row.kind == Node.PARAMETER)
    return HalfWeights(parameters, tuple(row.name for row in half if row.kind != Node.PARAMETER))


class ExplicitHalf(NamedTuple):
    """Holds the values of a step that are half precision whatever autocast does."""

    conversions: tuple[CodeLine, ...] = ()  #: the lines that matter to the failure
    from_conversion: bool = False  #: the failed op has its half precision from there, and not from autocast
    from_value: str = ""  #: the parameter, buffer or input from which it has it
    inputs: tuple[str, ...] = ()  #: what came in half from outside the step
    weights: HalfWeights = HalfWeights()

    @property
    def half_values(self) -> tuple[str, ...]:
        """All that was half before the step computed anything."""
        return (*self.weights.parameters, *self.weights.buffers, *self.inputs)

    @property
    def is_cause(self) -> bool:
        """Whether the failed op would be half precision without autocast too."""
        return bool(self.conversions or self.from_value)


def explicit_half(graph: StepGraph, seq: int, tried: Sequence[Tried], weights: HalfWeights) -> ExplicitHalf:
    """Finds the half precision that a program asked for itself in a step.

    Args:
        graph: The step.
        seq: The op whose half precision is to be explained.
        tried: What was tried on the step: a conversion that no replay replaced follows the dtype of something else.
        weights: The half parameters and buffers.
    """
    source = _nearest_source(graph, seq)
    converts = source is not None and source.op not in ENTRY_NODES
    line = CodeLine(source.file, source.line, source.code) if source is not None and converts else None
    replaced = [each.conversions for each in tried if each.change in (Change.FP32, Change.CONVERSIONS)]
    from_conversion = line is not None and (not replaced or any(each is None or line in each for each in replaced))
    return ExplicitHalf(
        conversions=(line,) if from_conversion and line is not None else _that_mattered(tried),
        from_conversion=from_conversion,
        from_value=_value_name(source, weights) if source is not None and not converts else "",
        inputs=tuple(_half_inputs(graph, weights)),
        weights=weights,
    )


def _that_mattered(tried: Sequence[Tried]) -> tuple[CodeLine, ...]:
    """The conversions without which the step came out finite, or failed elsewhere.

    One that finds its operand in half precision already leaves no trace of itself: only trying shows it.
    """
    without = [each for each in tried if each.change == Change.CONVERSIONS and each.outcome == Trial.FINITE]
    moved = [each for each in tried if each.change == Change.MODULES_FP32 and LOSS_CODE not in each.modules]
    return next((each.conversions for each in (*without, *moved) if each.conversions), ())


def _value_name(site: SiteRow, weights: HalfWeights) -> str:
    """The name of a value from outside; frozen weights are told by the module that reads them."""
    if site.op != Node.INPUT:
        return site.name
    inside = [name for name in weights.parameters if name.rpartition(".")[0] == site.module]
    return listed(inside, NAMED) or site.name


def _half_inputs(graph: StepGraph, weights: HalfWeights) -> Iterator[str]:
    """The names of inputs that are half, each once; without those by which frozen weights go."""
    sites = {row.site: graph.site(seq) for seq in sorted(graph.outputs) for row in graph.outputs[seq][:1]}
    half = [site for site in sites.values() if site.op == Node.INPUT and _is_half(site)]
    return iter(dict.fromkeys(site.name for site in half if _value_name(site, weights) == site.name))


def _nearest_source(graph: StepGraph, seq: int) -> SiteRow | None:
    """The nearest program point upstream that made a value half by itself; None where autocast did."""
    seen: set[int] = set()
    front = [_forward_of(graph, seq)]
    while front:
        for each in front:
            site = graph.site(each)
            if _is_half(site) and (site.op in ENTRY_NODES or _asks_for_half(site)):
                return site
        seen.update(front)
        front = [source for each in front for source in _half_sources(graph, each) if source not in seen]
        front = list(dict.fromkeys(front))
    return None


def _forward_of(graph: StepGraph, seq: int) -> int:
    """The op of forward whose gradient an op of backward computes: it has its dtypes from there."""
    number = graph.site(seq).forward_site
    ran = [other for other, rows in graph.outputs.items() if other < seq and rows[0].site == number]
    return max(ran, default=seq)


def _is_half(site: SiteRow) -> bool:
    return bool(HALF_DTYPES & set(site.out_dtypes))


def _asks_for_half(site: SiteRow) -> bool:
    """Whether the code names a half dtype there: a conversion, or an op that was told its dtype."""
    if site.phase == Phase.BACKWARD or site.cast in (Cast.AUTOCAST, Cast.PROMOTION):
        return False
    return site.cast == Cast.EXPLICIT or not HALF_DTYPES & set(site.in_dtypes)


def _half_sources(graph: StepGraph, seq: int) -> list[int]:
    """Returns the ops that wrote an op's half operands.

    There are none where autocast cast an operand: then the op is half precision by autocast's policy.
    """
    site = graph.site(seq)
    if site.cast:
        return [edge.from_seq for edge in graph.inputs[seq]] if not _is_half(site) else []
    found = []
    for edge in graph.inputs[seq]:
        if set(site.in_dtypes[edge.arg : edge.arg + 1]) & HALF_DTYPES:
            if graph.site(edge.from_seq).cast == Cast.AUTOCAST:
                return []
            found.append(edge.from_seq)
    return found


# -- in words ---------------------------------------------------------------------------------------------------------


def places(lines: Sequence[CodeLine]) -> str:
    """``the conversion to half precision at train.py:8``."""
    found = [line.place for line in lines]
    what = "the conversion" if len(found) == 1 else "the conversions"
    return f"{what} to half precision at {listed(found, NAMED)}"


def rewritten(lines: Sequence[CodeLine], dtype: str) -> str:
    """The lines with ``dtype`` in place of the half dtype they name; empty where that cannot be told from the text."""
    return "\n".join(_rewritten(lines[:NAMED], dtype))


def _rewritten(lines: Sequence[CodeLine], dtype: str) -> Iterator[str]:
    for line in lines:
        other = converted(line.code, dtype)
        if other is not None and line.place.isprintable():
            yield f"{other.after}  # {line.place}"


def in_words(explicit: ExplicitHalf) -> str:
    """States why a failed op runs in half precision, with a space before it; empty where autocast is the reason."""
    if explicit.conversions:
        place, code = explicit.conversions[0].place, explicit.conversions[0].code
        said = "The op runs in half precision because" if explicit.from_conversion else "Whatever autocast does,"
        return f" {said} the code itself converts to half precision at {place}{f': {code}' if code else ''}."
    if explicit.from_value:
        return f" The op runs in half precision because of {explicit.from_value}, which autocast does not rule."
    return ""
