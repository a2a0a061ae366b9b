"""Warnings of failures that have not happened yet, and will if the run goes on as it does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ampscope.analysis.causes.ahead import Moving, Near, OutsideWindow
from ampscope.analysis.causes.cause_entry import Occurrence, Reason
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.precision.ranges.measured import NEAR_BITS, MeasuredPlace, MeasuredRun, measured_places
from ampscope.analysis.precision.ranges.places import EACH_SCALE, place_of
from ampscope.analysis.results import Incident
from ampscope.analysis.scale.window import LEAST_LOOKS, MOSTLY
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.analysis.tables.lazy_tables import collect_rows
from ampscope.analysis.tables.step_history import History
from ampscope.forecast import Forecast, forecast_fall
from ampscope.provenance.large_values import cannot_harm, is_meant, magnitude
from ampscope.trace.dtypes import FINFO
from ampscope.trace.read.run import Run
from ampscope.trace.schema import OpRow, Phase, Source, Table, source_of
from ampscope.trace.vocabulary import Cause, Severity

#: Gradients fall as a loss does that is learnt: one whose bits fell by this share of theirs explains it.
LEARNT = 0.4


def is_learnt(history: History | None, since: int, until: int, fallen: float) -> bool:
    """Whether the loss falls as the gradients do.

    Args:
        history: The steps of their optimizer.
        since: The step since which they have fallen.
        until: The newest in which they were measured.
        fallen: By how many bits.
    """
    if history is None:
        return False
    begin, end = np.searchsorted(history.step, [since, until + 1])
    losses = history.loss[begin:end]
    losses = losses[np.isfinite(losses)]
    if losses.size < 2 or (losses <= 0).any():
        return bool((losses <= 0).any())
    part = max(1, losses.size // 5)
    lost = math.log2(float(np.median(losses[:part]))) - math.log2(float(np.median(losses[-part:])))
    return lost >= LEARNT * fallen


@dataclass(frozen=True, slots=True)
class Warnings:
    """Makes warnings of what was measured on one rank."""

    run: Run
    sites: SiteTable
    measured: MeasuredRun

    def graph(self, seen: MeasuredPlace, step: int | None = None) -> StepGraph:
        """A step in which a place was measured, by default the newest."""
        step = seen.course[-1][0] if step is None else step
        execution = Source.LIVE if step in self.measured.live else Source.REPLAY
        return StepGraph(self.run, self.sites, step, source_of(execution, seen.place.optimizer))

    def warning(
        self,
        cause: Cause,
        reason: Reason,
        seen: MeasuredPlace,
        graph: StepGraph,
        seq: int | None,
        *,
        headroom: float | None = None,
    ) -> Incident:
        """The warning that a place is.

        Args:
            cause: What it warns of.
            reason: What was seen.
            seen: The place.
            graph: The step that shows it.
            seq: Its op there, if the step has it.
            headroom: Doublings left to overflow, where that is what it warns of.
        """
        site = graph.place(seq) if seq is not None else None
        place, ahead = seen.place, seen.forecast
        told = Occurrence(op=place.op, name=place.name, module=place.module, reason=reason)
        incident = incident_at(cause, graph.step, place.phase, told=told, graph=graph, seq=seq, site=site)
        return replace(
            incident,
            source=incident.source if seq is not None else place.source,
            traced=graph.source,
            remedies=remedies(cause, op=place.op, module=place.module, reason=reason),
            headroom_bits=headroom,
            forecast_step=ahead.step if ahead is not None else None,
            forecast_low=ahead.low if ahead is not None else None,
            forecast_high=ahead.high if ahead is not None else None,
        )


def largest_at(graph: StepGraph, seen: MeasuredPlace) -> int | None:
    """The op that gave the largest value at a place in a step; None where the step has none of it."""
    found: list[tuple[float, int]] = []
    for seq, rows in graph.outputs.items():
        for row in rows:
            place = place_of(graph.site(seq), row.out, seen.place.optimizer)
            if place == seen.place:
                found.append((magnitude(row), -seq))
    return -max(found)[1] if found else None


#: The share of values that a window may leave below float16's normal numbers: a tail is no loss.
TAIL = 0.01
#: Bits that a window has at least: a scale that grows twice has to find room.
LEAST_WINDOW = 2.0
_HALF = FINFO["float16"]


@dataclass(frozen=True, slots=True)
class _Spread:
    """Describes the spread of the non-zero values of all float16 gradients of a step, loss scale included."""

    counts: dict[int, int]  #: by exponent
    largest: float
    subnormal: int
    zeros: int
    lowest: OpRow  #: the row with the most subnormal values

    @property
    def share(self) -> float:
        """The share of subnormal values among the non-zero ones."""
        return self.subnormal / max(1, sum(self.counts.values()))

    @property
    def zero_share(self) -> float:
        """The share of zeros among all values; flushed ones count among the zeros alone."""
        return self.zeros / max(1, self.zeros + sum(self.counts.values()))

    @property
    def low_end(self) -> int:
        """The exponent below which only the tail lies."""
        left = TAIL * sum(self.counts.values())
        for exponent in sorted(self.counts):
            left -= self.counts[exponent]
            if left < 0:
                return max(exponent, _HALF.lowest)  # a damaged table says anything
        return _HALF.normal


def scale_window(make: Warnings, history: Mapping[int, History]) -> Incident | None:
    """The warning of a loss scale below the window in which nothing is lost, at the newest step that tells it."""
    step = _newest_measured(make)
    if step is None or 0 not in history:
        return None
    scale, spread = history[0].scale_at(step), _spread(make, step)
    if not 0 < scale < math.inf or spread is None or spread.share < MOSTLY:
        return None
    high = scale * 2.0 ** math.floor(math.log2(_HALF.max / spread.largest))
    low = scale * 2.0 ** (_HALF.normal - spread.low_end)
    if not math.isfinite(high) or low <= scale or math.log2(high / low) < LEAST_WINDOW:
        return None
    place = place_of(make.sites[spread.lowest.site], spread.lowest.out, 0)
    seen = next((each for each in make.measured.places if each.place == place), None)
    if seen is None or len(seen.course) < LEAST_LOOKS or _has_fallen(seen, history[0], low / scale):
        return None
    zeros = spread.zero_share
    reason = OutsideWindow(
        scale=scale, low=low, high=high, share=spread.share, zeros=zeros, least=zeros > TAIL, step=step
    )
    return make.warning(Cause.SCALE_WINDOW, reason, seen, make.graph(seen, step), spread.lowest.seq)


def _has_fallen(seen: MeasuredPlace, history: History, missing: float) -> bool:
    """Whether gradients lie low because the loss was learnt: they fell with it by what the scale is short of."""
    heights = [height for _, height in seen.course]
    part = max(1, len(heights) // 5)
    fallen = float(np.median(heights[:part])) - float(np.median(heights[-part:])) if heights else 0.0
    if fallen < max(math.log2(missing), 0.0):
        return False
    return is_learnt(history, seen.course[0][0], seen.course[-1][0], fallen)


def _newest_measured(make: Warnings) -> int | None:
    """The newest step with full statistics of its gradients, among the newest that a course is drawn through."""
    live = source_of(Source.LIVE, 0)
    backward = [number for number, site in make.sites.rows.items() if site.phase == Phase.BACKWARD]
    if not backward or not make.measured.live or not make.measured.course:
        return None
    ops = make.run.table(Table.OPS, step=make.measured.course[-EACH_SCALE:], rank=make.sites.rank)
    where = f"source = '{live}' AND subnormals IS NOT NULL AND site IN ({', '.join(map(str, backward))})"
    found = collect_rows(ops, "step", where=where, order="step DESC", limit=1)
    return int(found[0][0]) if found else None


def _spread(make: Warnings, step: int) -> _Spread | None:
    rows = make.run.rows(Table.OPS, step=step, source=source_of(Source.LIVE, 0), rank=make.sites.rank)
    gradients = [row for row in rows if _is_counted_gradient(make, row)]
    if not gradients:
        return None
    counts: dict[int, int] = {}
    for row in gradients:
        for number, count in enumerate(row.statistics.exp_counts or ()):
            exponent = (row.statistics.exp_low or 0) + number
            counts[exponent] = counts.get(exponent, 0) + count
    largest = max(row.statistics.max_finite or 0.0 for row in gradients)
    if not _HALF.smallest_subnormal <= largest <= _HALF.max:
        return None
    subnormal, zeros = (
        sum(getattr(row.statistics, name) or 0 for row in gradients) for name in ("subnormals", "zeros")
    )
    return _Spread(counts, largest, subnormal, zeros, max(gradients, key=lambda row: row.statistics.subnormals or 0))


def _is_counted_gradient(make: Warnings, row: OpRow) -> bool:
    site = make.sites[row.site]
    half = 0 <= row.out < len(site.out_dtypes) and site.out_dtypes[row.out] == "float16"
    return half and site.phase == Phase.BACKWARD and row.statistics.subnormals is not None


#: Newest sampled steps of which the largest value counts; of fewer nothing is said.
NEWEST = 3
#: Gradients that fall are those of several ops, one after the other, at this share of the pace at least: fewer are a
#: matter of one op's own.
LEAST_FALLING, ALONG = 3, 0.5
#: What has happened needs no warning.
_HAPPENED = frozenset({Cause.FP16_OVERFLOW, Cause.DIVERGENCE})


def risks(run: Run, sites: SiteTable, history: Mapping[int, History], failures: Iterable[Incident]) -> list[Incident]:
    """Returns warnings of failures that have not happened yet, and were measured to be on their way.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        history: The steps of that rank, by optimizer.
        failures: What did go wrong.
    """
    if not run.stamp(Table.OPS, rank=sites.rank):
        return []
    measured = measured_places(run, rank=sites.rank, whole=False)
    make = Warnings(run, sites, measured)
    overflown = any(each.cause in _HAPPENED and each.severity is Severity.ERROR for each in failures)
    found: list[Incident | None] = []
    if not overflown:
        found += [_growing(make), _near(make)]
    return [each for each in (*found, _falling(make, history), scale_window(make, history)) if each is not None]


def _growing(make: Warnings) -> Incident | None:
    """The place that will overflow first."""
    ahead = [each for each in make.measured.places if each.may_overflow and each.forecast is not None]
    for seen in sorted(ahead, key=_expected):
        graph = make.graph(seen)
        seq = largest_at(graph, seen)
        if seq is None or not cannot_harm(graph, seq):
            assert seen.forecast is not None
            reason = _moving(seen, seen.forecast, len(ahead) - 1)
            return make.warning(Cause.TREND_OVERFLOW, reason, seen, graph, seq, headroom=seen.newest_headroom)
    return None


def _expected(seen: MeasuredPlace) -> int:
    return seen.forecast.step if seen.forecast is not None else -1


def _moving(seen: MeasuredPlace, ahead: Forecast, others: int) -> Moving:
    step, newest = seen.course[-1]
    return Moving(
        dtype=seen.place.dtype,
        newest=2.0**newest,
        step=step,
        ahead=ahead,
        others=others,
    )


def _near(make: Warnings) -> Incident | None:
    """The place that is closest to overflow, where it is close, and not told already for growing."""
    close = [each for each in make.measured.places if each.may_overflow and each.forecast is None]
    close = [each for each in close if len(each.course) >= NEWEST and _headroom(each) < NEAR_BITS]
    for seen in sorted(close, key=_headroom):
        step, log = max(seen.course[-NEWEST:], key=lambda point: point[1])
        graph = make.graph(seen, step)
        seq = largest_at(graph, seen)
        if seq is None or is_meant(graph, seq) or cannot_harm(graph, seq):
            continue
        reason = Near(dtype=seen.place.dtype, largest=2.0**log, bits=_headroom(seen), step=step)
        return make.warning(Cause.NEAR_OVERFLOW, reason, seen, graph, seq, headroom=reason.bits)
    return None


def _headroom(seen: MeasuredPlace) -> float:
    newest = max(log for _, log in seen.course[-NEWEST:])
    return max(0.0, math.log2(seen.place.format.max) - newest)


def _falling(make: Warnings, history: Mapping[int, History]) -> Incident | None:
    """The gradient that will be below float16's normal numbers first, where several fall and no loss does."""
    gradients = [each for each in make.measured.places if _is_half_gradient(each)]
    ahead = [(each, each.still_ahead(forecast_fall(each.course, each.place.format.normal))) for each in gradients]
    found = [
        replace(each, told=fall)
        for each, fall in ahead
        if fall is not None
        and not is_learnt(history.get(each.place.optimizer), fall.since, each.course[-1][0], fall.rise)
    ]
    if not found:
        return None
    seen = min(found, key=_expected)
    assert seen.forecast is not None
    pace = seen.forecast.bits_per_step
    along = [each for each in gradients if (each.bits_per_step or 0.0) <= ALONG * pace]
    if len(along) < LEAST_FALLING:
        return None
    graph = make.graph(seen)
    reason = _moving(seen, seen.forecast, len(found) - 1)
    return make.warning(Cause.TREND_UNDERFLOW, reason, seen, graph, largest_at(graph, seen))


def _is_half_gradient(seen: MeasuredPlace) -> bool:
    place = seen.place
    return place.phase == Phase.BACKWARD and place.dtype == "float16" and not place.is_node and not seen.fixed
