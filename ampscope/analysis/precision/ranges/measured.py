"""Every place of one rank that was measured has its course, its scale, its zeros and overflows, and a trend."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ampscope.analysis.op_facts import LOGARITHMS, Executed, divides
from ampscope.analysis.overview.bad_steps import sampled_rank, world_of
from ampscope.analysis.precision.ranges.magnitudes import Cells, Magnitudes, magnitudes
from ampscope.analysis.precision.ranges.places import OpPlace, SampledExecutions, place_of, sampled_steps
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.analysis.tables.lazy_tables import collect_rows
from ampscope.analysis.tables.step_history import History, histories
from ampscope.forecast import Forecast, Point, bits_per_step, forecast_overflow
from ampscope.provenance import is_deliberate
from ampscope.provenance.large_values import scaled
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, OpRow, Source, Table, Trigger, execution_of, source_of

#: Steps that are looked at: the newest.
_MOST_STEPS = 16


class FlushedGradients(NamedTuple):
    """Counts a gradient's zeros that float32 would not have had, as far as that is known."""

    zeros: int = 0  #: those that float32 would not have had
    judged: int = 0  #: elements of which it is known


def flushed_gradients(run: Run, rank: int, sampled: SampledExecutions) -> Mapping[OpPlace, FlushedGradients]:
    """The gradients of the steps that lost some: there the same step in float32 was recorded with every statistic."""
    rows = run.rows(Table.INCIDENTS, rank=rank)
    lost = {row.step for row in rows if row.trigger == Trigger.LOST_GRADIENT} - set(sampled.unlike)
    if not lost:
        return {}
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank) if site.op == Node.GRADIENT}
    where = f"zeros IS NOT NULL AND site IN ({', '.join(map(str, sites)) or -1})"
    ops = run.table(Table.OPS, step=sorted(lost)[-_MOST_STEPS:], rank=rank)
    by_run: dict[str, dict[tuple[int, str], tuple[int, int, int]]] = defaultdict(dict)
    for source, step, site, zeros, numel in collect_rows(
        ops, "source, step, site, sum(zeros), sum(numel)", "source, step, site", where=where
    ):
        by_run[source][step, sites[site].name] = site, int(zeros), int(numel)
    found: dict[OpPlace, FlushedGradients] = defaultdict(FlushedGradients)
    for optimizer in set(sampled.optimizers.values()):
        wide = by_run[source_of(Source.REPLAY_FP32, optimizer)]
        for key, (site, zeros, numel) in by_run[source_of(Source.REPLAY, optimizer)].items():
            place = place_of(sites[site], 0, optimizer)
            if key in wide and wide[key][2] == numel and place is not None:
                before = found[place]
                more = max(0, zeros - wide[key][1])
                found[place] = FlushedGradients(before.zeros + more, before.judged + numel)
    return found


#: Steps that are looked at: the newest that went wrong.
MOST_STEPS = 16


class OverflowedSteps(NamedTuple):
    """The steps in which places overflowed, a step as often as its results did."""

    steps: Mapping[OpPlace, Sequence[int]]
    is_whole: bool  #: whether all traced steps that went wrong were looked at, not the newest alone


#: Of what nobody looked at.
NONE = OverflowedSteps({}, True)


def overflowed(run: Run, rank: int, sampled: SampledExecutions) -> OverflowedSteps:
    """The steps in which each place gave an infinity though all that it read was finite; masks and poles are none.

    A step is there as often as that happened in it.
    """
    wrong = {row.step for row in run.rows(Table.INCIDENTS, rank=rank)} - set(sampled.unlike)
    traced = [each for each in run.traced(rank) if each.step in wrong and each.source in sampled.optimizers]
    sites, found = SiteTable(run, rank), defaultdict[OpPlace, list[int]](list)
    once = {(each.step, sampled.optimizers[each.source]): each for each in traced}  # as it ran or in its replay
    newest = sorted(once.values(), key=lambda one: -one.step)
    for each in newest[:MOST_STEPS]:
        graph = StepGraph(run, sites, each.step, each.source)
        infinite = [seq for seq, rows in graph.outputs.items() if any(map(_has_infinity, rows))]
        for seq in infinite:
            place = _overflowed_at(graph, seq, sampled.optimizers[each.source])
            if place is not None:
                found[place].append(each.step)
    return OverflowedSteps(found, len(newest) <= MOST_STEPS)


def _overflowed_at(graph: StepGraph, seq: int, optimizer: int) -> OpPlace | None:
    row, site = graph.bad_output(seq), graph.site(seq)
    if row is None or site.op in ENTRY_NODES | SINK_NODES or not _has_infinity(row):
        return None
    if graph.bad_inputs(seq) or graph.is_cut(seq) or is_deliberate(graph, seq) or _is_at_a_pole(Executed(graph, seq)):
        return None
    return place_of(site, row.out, optimizer)


def _is_at_a_pole(op: Executed) -> bool:
    """Whether what it gives is infinite in every dtype: the logarithm of zero, or a division by it."""
    return op.name in LOGARITHMS or (divides(op.site.op) and op.divides_by_zero)


def _has_infinity(row: OpRow) -> bool:
    return any(end is not None and math.isinf(end) for end in (row.min, row.max))


class ScaledPlaces(NamedTuple):
    """Holds the places of one rank that carry the loss scale, or are the scale itself."""

    scale: frozenset[OpPlace] = frozenset()  #: the loss scale itself
    carrying: frozenset[OpPlace] = frozenset()


def scaled_places(run: Run, rank: int, sampled: SampledExecutions, history: Mapping[int, History]) -> ScaledPlaces:
    """Returns the places that carry the loss scale, by the newest step that each optimizer's sampled steps end with.

    Args:
        run: The run.
        rank: The rank.
        sampled: Its sampled steps.
        history: The steps of the rank, by optimizer.
    """
    sites = SiteTable(run, rank)
    is_scale: set[OpPlace] = set()
    carrying: set[OpPlace] = set()
    for source, optimizer, step in _newest(sampled):
        scale = history[optimizer].scale_at(step) if optimizer in history else math.nan
        if math.isnan(scale):
            continue
        graph = StepGraph(run, sites, step, source)
        found = scaled(graph, scale)
        for places, seqs in ((is_scale, found.scale), (carrying, found.carrying)):
            rows = (row for seq in seqs for row in graph.outputs[seq])
            given = (place_of(graph.site(row.seq), row.out, optimizer) for row in rows)
            places |= {place for place in given if place is not None}
    return ScaledPlaces(frozenset(is_scale), frozenset(carrying - is_scale))


def _newest(sampled: SampledExecutions) -> Iterator[tuple[str, int, int]]:
    """The newest step that was traced as it ran, and the newest of the replays: where a value enters has two names."""
    for source, optimizer in sampled.optimizers.items():
        is_live = execution_of(source)[0] == Source.LIVE
        steps = [step for step in sampled.course if (step in sampled.live) == is_live and step not in sampled.unlike]
        if steps:
            yield source, optimizer, steps[-1]


#: A value is near overflow where it may not double.
NEAR_BITS = 1.0
#: What a training keeps from step to step, and an overflow of it stays.
_KEPT = frozenset({Node.PARAMETER, Node.WEIGHT_AFTER, Node.STATE_AFTER, Node.BUFFER_AFTER})
#: A trend is told as long as the run has gone on unseen for at most this share of the steps that it was seen for.
UNSEEN = 0.5
#: Steps between the first sampled one and the last, with fewer of which nothing is said of how a value grows.
LEAST_SPAN = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredPlace:
    """A place with its course, for what looks closer than a row can; what takes fits is found when it is asked for."""

    seen: Magnitudes
    scale: float | None  #: the loss scale that is in the newest of its values
    last: int = -1  #: the newest step of the run; -1 where that is not known
    overflows: Sequence[int] = ()  #: the steps in which its results became infinite, once for each result
    overflows_at_least: bool = False  #: whether older steps that went wrong were not looked at
    told: Forecast | None = None  #: stands for its forecast, where that is of another kind

    @property
    def place(self) -> OpPlace:
        """The place that was measured."""
        return self.seen.place

    @property
    def course(self) -> tuple[Point, ...]:
        """The logarithm of its largest magnitude by sampled step."""
        return self.seen.course

    @property
    def overflowed(self) -> int:
        """Results that became infinite."""
        return len(self.overflows)

    @property
    def may_overflow(self) -> bool:
        """Whether an overflow there would be one that nothing makes good: a loss scale makes room for gradients.

        One that has overflowed was judged by what came of it.
        """
        if self.fixed or self.seen.bad or not self.course or (self.place.is_node and self.place.op not in _KEPT):
            return False
        return self.scale is None

    @cached_property
    def fixed(self) -> bool:
        """Whether it cannot grow: a bounded function, or the same in every step, as constants of the code are."""
        logs = [height for _, height in self.course]
        return self.place.is_bounded or (len(logs) > 1 and max(logs) == min(logs))

    @cached_property
    def forecast(self) -> Forecast | None:
        """When it overflows; None where nothing says that it will."""
        if self.told is not None or self.fixed or self.overflowed:
            return self.told
        return self.still_ahead(forecast_overflow(self.course, math.log2(self.place.format.max)))

    def still_ahead(self, found: Forecast | None) -> Forecast | None:
        """Returns the part of a forecast that is left at the end of the run.

        That is None where its time has passed, or it rests on the past.
        """
        if found is None or found.high <= self.last:
            return None
        newest = self.course[-1][0]
        if self.last - newest > UNSEEN * (newest - found.since):
            return None
        return found._replace(step=max(found.step, self.last + 1), low=max(found.low, self.last + 1))

    @cached_property
    def bits_per_step(self) -> float | None:
        """How fast it grows; None where its sampled steps lie so close together that they say nothing of it."""
        if self.forecast is not None:
            return self.forecast.bits_per_step
        is_seen_long = len(self.course) > 1 and self.course[-1][0] - self.course[0][0] >= LEAST_SPAN
        return bits_per_step(self.course) if is_seen_long else None

    @property
    def newest_headroom(self) -> float | None:
        """Factors of two between its newest magnitude and overflow; None where there is none."""
        return max(0.0, math.log2(self.place.format.max) - self.course[-1][1]) if self.course else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The measured places of one rank."""

    rank: int
    steps: int
    live: frozenset[int] = field(default_factory=frozenset)  #: steps that were traced as they ran
    replayed: int = 0  #: further ones that were in a replay
    course: tuple[int, ...] = ()  #: steps that the courses are drawn through
    places: tuple[MeasuredPlace, ...] = ()
    cells: Cells = field(default_factory=Cells)  #: where all sampled steps were summed up


def measured_places(run: Run, *, rank: int | None = None, whole: bool = True) -> MeasuredRun:
    """Every place of one rank that was measured, with its course; in no order.

    Args:
        run: The run.
        rank: Whose; by default the first that was traced.
        whole: Sum up all sampled steps, not only those that the courses are drawn through.
    """
    rank = sampled_rank(run, world_of(run)) if rank is None else rank
    history = histories(run, rank)
    sampled = sampled_steps(run, rank)
    found, cells = magnitudes(run, rank, sampled, whole=whole)
    scaled = scaled_places(run, rank, sampled, history)
    lost = overflowed(run, rank, sampled) if whole else NONE
    flushed = flushed_gradients(run, rank, sampled) if whole else {}
    last = {number: int(each.step[-1]) for number, each in history.items() if each.step.size}
    return MeasuredRun(
        rank=rank,
        steps=sum(each.step.size for each in history.values()),
        live=sampled.live,
        replayed=sampled.count - len(sampled.live),
        course=sampled.course,
        places=tuple(
            MeasuredPlace(
                seen=_with(flushed.get(each.place), each),
                scale=_scale(each, history) if each.place.is_gradient or each.place in scaled.carrying else None,
                last=last.get(each.place.optimizer, -1),
                overflows=lost.steps.get(each.place, ()),
                overflows_at_least=not lost.is_whole,
            )
            for each in found
            if each.place not in scaled.scale and each.place.is_read
        ),
        cells=cells,
    )


def _with(flushed: FlushedGradients | None, seen: Magnitudes) -> Magnitudes:
    """Adds to a place's magnitudes what replays in float32 tell of its zeros."""
    if flushed is None:
        return seen
    return replace(seen, flushed=seen.flushed + flushed.zeros, judged=seen.judged + flushed.judged)


def _scale(seen: Magnitudes, history: Mapping[int, History]) -> float | None:
    """The loss scale at the newest value of a place that carries it."""
    if seen.place.optimizer not in history or not seen.course:
        return None
    scale = history[seen.place.optimizer].scale_at(seen.course[-1][0])
    return None if math.isnan(scale) else scale
