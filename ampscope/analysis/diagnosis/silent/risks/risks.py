"""The warnings of a run: values near overflow or on their way there, gradients that slide below float16's range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ampscope.analysis.causes.ahead import Moving, Near
from ampscope.analysis.diagnosis.silent.risks.learnt import is_learnt
from ampscope.analysis.diagnosis.silent.risks.scale_window import scale_window
from ampscope.analysis.diagnosis.silent.risks.warning import Warnings, largest_at
from ampscope.analysis.origin.step_graph import Sites
from ampscope.analysis.precision.ranges.measured import NEAR_BITS, MeasuredPlace, measured_places
from ampscope.analysis.results import Incident
from ampscope.analysis.tables.step_history import History
from ampscope.forecast.forecast import Forecast, forecast_fall
from ampscope.provenance.meant import cannot_harm, is_meant
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Phase, Table
from ampscope.trace.vocabulary import Cause, Severity

#: Newest sampled steps of which the largest value counts; of fewer nothing is said.
NEWEST = 3
#: Gradients that fall are those of several ops, one after the other, at this share of the pace at least: fewer are a
#: matter of one op's own.
LEAST_FALLING, ALONG = 3, 0.5
#: What has happened needs no warning.
_HAPPENED = frozenset({Cause.FP16_OVERFLOW, Cause.DIVERGENCE})


def risks(run: Run, sites: Sites, history: Mapping[int, History], failures: Iterable[Incident]) -> list[Incident]:
    """What has not happened yet and was measured to be on its way, as warnings.

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
        since=ahead.since,
        bits_per_step=ahead.bits_per_step,
        at=ahead.step,
        low=ahead.low,
        high=ahead.high,
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
        each.with_forecast(fall) for each, fall in ahead if fall is not None and not _is_learnt(history, each, fall)
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


def _is_learnt(history: Mapping[int, History], seen: MeasuredPlace, fall: Forecast) -> bool:
    return is_learnt(history.get(seen.place.optimizer), fall.since, seen.course[-1][0], fall.rise)
