"""Failures without a non-finite value lose gradients, updates or differences, or have overflows that nothing shows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import narwhals as nw
import numpy as np

from ampscope.analysis import rounding
from ampscope.analysis.causes.catalogue import explanation
from ampscope.analysis.causes.cause_entry import Occurrence, Reason
from ampscope.analysis.causes.recognition import Recognised
from ampscope.analysis.causes.underflow import GradientFlushed, GradientLost, UpdatesLost, ValuesLost
from ampscope.analysis.cures.explicit_half import ExplicitHalf
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.op_facts import Executed, numel
from ampscope.analysis.results import Incident, SourceLine
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.analysis.tables.lazy_tables import collect
from ampscope.analysis.tables.step_history import History
from ampscope.analysis.tables.traced_steps import traced_steps
from ampscope.analysis.words import op_in_words
from ampscope.provenance import LostMass, Origin, absorbed, hidden, lost_mass, origins
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.evidence import Evidence
from ampscope.trace.read.run import Run
from ampscope.trace.schema import IncidentRow, Node, Phase, SiteRow, Source, Table, Trigger, said, source_of
from ampscope.trace.vocabulary import Cause

#: Incidents in which nothing that matters is other than finite.
_ABSORBED = (Trigger.ABSORBED_OVERFLOW, Trigger.CARRIED_READ)
#: A distance from float32 that is worth a number.
_APART = 0.1
#: What is farther off than this many times is so far off that the number says no more.
_FAR_OFF = 10.0


def origins_of(row: IncidentRow, graph: StepGraph) -> list[Origin]:
    """The origins of an incident in one execution of its step, the one that matters most first."""
    if row.trigger not in _ABSORBED:
        return origins(graph)
    pairs = Evidence.of(row).hidden
    return [each for each in hidden(graph) if (each.seq, each.sink) in pairs] if pairs else absorbed(graph)


def as_hidden(row: IncidentRow, graph: StepGraph, origin: Origin, incident: Incident) -> Incident:
    """An incident with what hid its overflow, and with what the same step has in float32.

    Args:
        row: The incident's row.
        graph: The execution of the step in which it was hidden.
        origin: The overflow, and the way to what hid it.
        incident: The incident.
    """
    known = Evidence.of(row)
    if (origin.seq, origin.sink) not in known.hidden:
        return incident
    site = graph.place(origin.sink)
    where = f" at {site.file.rpartition('/')[2]}:{site.line}" if site.file else ""
    text = f" {op_in_words(site.op)}{where} made finite numbers of it, so neither the loss nor a gradient shows it."
    gradients = _apart(known.gradients_apart, "gradients", "their")
    loss = _apart(known.loss_apart, "a loss", "its")
    told = " and ".join(filter(None, (gradients, loss))) or "other gradients for some parameters"
    return replace(incident, explanation=f"{incident.explanation}{text} The same step in float32 has {told}.")


def _apart(share: float | None, what: str, whose: str) -> str:
    if share is None or share < _APART:
        return ""
    how_far = f"{share:.0%} of {whose} size" if share < _FAR_OFF else f"many times {whose} size"
    return f"{what} that differ{'s' if whose == 'its' else ''} by {how_far}"


_CAST, _GRID = "aten._to_copy.default", "aten.arange.start_step"


class LostGradient(NamedTuple):
    """Holds the origin and the cause of gradients that a step lost."""

    graph: StepGraph
    origin: Origin
    found: Recognised


def lost_gradient(run: Run, sites: SiteTable, row: IncidentRow) -> LostGradient | None:
    """The origin of an incident of lost gradients; None where the trace does not show it.

    Args:
        run: The run.
        sites: The sites of the incident's rank.
        row: The incident.
    """
    half = StepGraph(run, sites, row.step, source_of(Source.REPLAY, row.optimizer))
    wide = StepGraph(run, sites, row.step, source_of(Source.REPLAY_FP32, row.optimizer))
    loss = lost_mass(half, wide, row.bad_params)
    if loss is None:
        return None
    site = half.site(loss.origin.seq)
    phase = Phase.FORWARD if site.phase in (Phase.LOSS, Phase.RECOMPUTE) else said(Phase, site.phase, Phase.FORWARD)
    reason = _reason(row, loss, _dtype(site))
    cause = Cause.FP16_UNDERFLOW if reason.is_flushed else Cause.STAGNATION
    return LostGradient(half, loss.origin, Recognised(cause, loss.origin.seq, phase, reason))


def _dtype(site: SiteRow) -> str:
    return next((dtype for dtype in (*site.out_dtypes, *site.in_dtypes) if dtype in HALF_DTYPES), "")


def _reason(row: IncidentRow, loss: LostMass, dtype: str) -> GradientLost:
    shares = Evidence.of(row).lost
    worst = max(shares, key=lambda name: shares[name], default="a parameter")
    return GradientLost(
        how=loss.how,
        dtype=dtype,
        parameter=worst,
        share=shares.get(worst, loss.share),
        others=max(0, len(shares) - 1),
    )


def information_lost(graph: StepGraph, row: IncidentRow) -> list[tuple[Origin, Recognised]]:
    """The casts of an incident that made few values of many, in order, as far as the trace has them.

    Args:
        graph: The trace of the step.
        row: The incident.
    """
    known, found = Evidence.of(row), []
    for seq, (before, after) in sorted(known.distinct.items()):
        if seq in graph.outputs:
            site, cast = graph.site(seq), known.cast_before.get(seq)
            dtypes = {"dtype": _dtype(site), "read": next(iter(site.in_dtypes), "")}
            if cast is not None:
                dtypes = {"dtype": cast.dtype, "read": cast.read}
            changed, of = known.changed.get(seq, (0, 0))
            reason = ValuesLost(before=before, after=after, changed=changed, of=of, **dtypes)
            phase = site.phase if cast is None else Phase.FORWARD
            found.append((Origin(seq, 0, (seq,), seq), Recognised(Cause.INFORMATION_LOST, seq, phase, reason)))
    return found


def as_cast_before(row: IncidentRow, seq: int, examined: Examined) -> Examined:
    """Names a cast that the loop made before its step as the origin, in the place of the value that came in."""
    cast = Evidence.of(row).cast_before.get(seq)
    if cast is None:
        return examined
    incident, op, since = examined.incident, _CAST if cast.read else _GRID, cast.since
    name = incident.path[0].name if incident.path else ""
    text = explanation(incident.cause, Occurrence(op=op, reason=examined.reason))
    text += f" The loop did so before the step, which read it{f' as {name}' if name else ''}."
    if since < row.step:
        text += f" It was first seen before step {row.step:,}; step {since:,} had read such values, too."
    source = SourceLine.of(cast.source)
    located = replace(incident, step=since, op=op, module="", module_type="", source=source, explanation=text)
    return examined._replace(incident=located, explicit=ExplicitHalf())


#: Weights of which this share does not move in an optimizer step do not train.
LOST_SHARE = 0.9
#: A learning rate below this share of the highest of the run is still warming up (or has run down).
FULL_RATE = 0.5


def silent_failures(
    run: Run,
    sites: SiteTable,
    history: Mapping[int, History],
    *,
    lost: bool = False,
    held: frozenset[str] = frozenset(),
) -> list[Incident]:
    """Returns incidents that keep a run from learning although every value in it is finite.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        history: The steps of that rank, by optimizer.
        lost: Whether an incident tells of lost gradients already, from better evidence.
        held: Weights of which an incident tells already that their updates are rounded away.
    """
    return [*_lost_updates(run, sites, history, held), *(() if lost else _flushed_gradients(run, sites))]


@dataclass(frozen=True, slots=True)
class _Reading:
    """How much of an optimizer's update was lost at one step."""

    step: int
    share: float
    dtype: str
    weights: frozenset[str]  #: that were looked at


def _lost_updates(
    run: Run, sites: SiteTable, history: Mapping[int, History], held: frozenset[str]
) -> Iterator[Incident]:
    for optimizer, readings in _readings(run, sites.rank).items():
        if all(each.weights <= held for each in readings):
            continue
        # the first is of one step by itself, and an optimizer may begin gently (RAdam); the others look further back
        counted = [each for each in readings[1:] or readings if _at_full_rate(history.get(optimizer), each.step)]
        if counted and np.mean([each.share for each in counted]) >= LOST_SHARE:
            yield _lost(run, sites, optimizer, counted)


def _readings(run: Run, rank: int) -> dict[int, list[_Reading]]:
    """Returns by optimizer, in order of steps, the share of half-precision elements that a step left unchanged."""
    params = {row.param: row for row in run.rows(Table.PARAMS, rank=rank)}
    columns = ("optimizer", "step", "param", "unchanged")
    rows = collect(run.table(Table.GRADS, rank=rank).filter(~nw.col("unchanged").is_null()).select(*columns))
    steps: dict[tuple[int, int], list[tuple[int, float, str]]] = defaultdict(list)
    names: dict[tuple[int, int], set[str]] = defaultdict(set)
    for row in rows:
        of, key = params.get(row["param"]), (row["optimizer"], row["step"])
        steps[key].append((of.numel if of else 0, row["unchanged"], of.dtype if of else ""))
        names[key].add(of.name if of else "")
    readings: dict[int, list[_Reading]] = defaultdict(list)
    for (optimizer, step), weights in sorted(steps.items()):
        elements = max(1, sum(count for count, _, _ in weights))
        share = sum(count * each for count, each, _ in weights) / elements
        common = Counter(name for _, _, name in weights).most_common(1)[0][0]
        readings[optimizer].append(_Reading(step, share, common, frozenset(names[optimizer, step])))
    return readings


def _at_full_rate(history: History | None, step: int) -> bool:
    """Whether the learning rate was that of training, not of a warm-up that begins at zero."""
    if history is None:
        return True
    rates = history.lr[history.step == step]
    highest = np.nanmax(history.lr) if np.isfinite(history.lr).any() else math.nan
    return not rates.size or not rates[0] < FULL_RATE * highest


def _lost(run: Run, sites: SiteTable, optimizer: int, readings: list[_Reading]) -> Incident:
    first = readings[0]
    cause = Cause.BF16_PRECISION if first.dtype == "bfloat16" else Cause.HALF_PARAMS
    reason = UpdatesLost(dtype=first.dtype, share=float(np.mean([each.share for each in readings])))
    graph = StepGraph(run, sites, first.step, source_of(Source.LIVE, optimizer))
    found = _incident(first.step, cause, reason, graph, _last_update(graph))
    return replace(found, last_step=readings[-1].step, count=len(readings))


def _last_update(graph: StepGraph) -> int | None:
    """The op by which the optimizer wrote a parameter last."""
    written = [seq for seq in sorted(graph.outputs) if _writes_parameter(graph, seq)]
    return written[-1] if written else None


def _writes_parameter(graph: StepGraph, seq: int) -> bool:
    if graph.site(seq).phase != Phase.OPTIMIZER:
        return False
    while (before := next((edge for edge in graph.inputs[seq] if edge.in_place), None)) is not None:
        seq = before.from_seq
    return graph.site(seq).op == Node.PARAMETER


def _flushed_gradients(run: Run, sites: SiteTable) -> Iterator[Incident]:
    """Parameters whose gradient is exactly zero whenever it was looked at, because an op before rounded it to zero."""
    dead = _dead_parameters(run, sites.rank)
    if not dead:
        return
    for traced in traced_steps(run, rank=sites.rank)[::-1]:
        graph = StepGraph(run, sites, traced.step, traced.source)
        flush = next((seq for seq in sorted(graph.outputs) if flushes_all(Executed(graph, seq))), None)
        if flush is not None:
            reason = GradientFlushed(parameter=dead[0])
            yield _incident(traced.step, Cause.FP16_UNDERFLOW, reason, graph, flush)
            return


def _dead_parameters(run: Run, rank: int) -> list[str]:
    rows = run.table(Table.GRADS, rank=rank).group_by("param")
    seen = collect(rows.agg(nw.col("underflow").min().alias("least"), nw.col("nonfinite").max().alias("bad")))
    zero = {row["param"] for row in seen if row["least"] == 1.0 and not row["bad"]}
    return [row.name for row in run.rows(Table.PARAMS, rank=rank) if row.param in zero] if zero else []


def flushes_all(op: Executed) -> bool:
    """Whether an op of backward gave nothing but zeros although none of its operands is zero throughout.

    Certain only where the largest operands say that even their product is below half of float16's smallest number.
    """
    result = op.result
    if op.site.phase != Phase.BACKWARD or op.dtype != "float16" or not result.min == result.max == 0.0:
        return False
    sizes = [each.magnitude for each in op.ranges if each.low is not None]
    if not sizes or any(size is None or size == 0 for size in sizes):
        return False
    factors = [size for size in sizes if size is not None] + [abs(value) for _, value in op.numbers()]
    if op.name not in ("_to_copy", "mul", "mm", "bmm", "neg", "copy") or 0 in factors:  # times 0 is 0 on purpose
        return False
    terms = max(1, numel(op.site.in_shapes[0]) // max(1, numel(op.site.out_shapes[0]))) if "mm" in op.name else 1
    product = math.prod(factors if op.name in ("mul", "mm", "bmm") else factors[:1])
    return product * terms < rounding.SMALLEST["float16"] / 2


def _incident(step: int, cause: Cause, reason: Reason, graph: StepGraph, seq: int | None) -> Incident:
    incident = incident_at(
        cause, step, "" if seq is not None else Phase.OPTIMIZER, told=Occurrence(reason=reason), graph=graph, seq=seq
    )
    if incident.phase == Phase.OPTIMIZER:  # an optimizer's op is no module's
        incident = replace(incident, module="", module_type="")
    return replace(incident, remedies=remedies(cause, op=incident.op, reason=reason))
