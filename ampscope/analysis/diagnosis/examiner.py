"""Examines incidents of one rank: the origin, the cause in its context, and what was tried on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import LostBefore, Occurrence, Reason
from ampscope.analysis.causes.harmless import ScaleFell, Unexplained
from ampscope.analysis.causes.outside import CameIn
from ampscope.analysis.causes.overflow import LossGrew
from ampscope.analysis.causes.recognition import Recognised, first_overflow, parameters_module, recognise
from ampscope.analysis.causes.unknown import Observed, wider_reduction
from ampscope.analysis.cures import explicit_half, trials
from ampscope.analysis.cures.explicit_half import ExplicitHalf, half_weights
from ampscope.analysis.diagnosis.bad_state import (
    as_write,
    examined_held,
    examined_state,
    examined_still,
    left_by,
    state_found,
    still_found,
)
from ampscope.analysis.diagnosis.context import Context, led_to_error, raised, why_unknown
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.diagnosis.silent_failures import (
    as_cast_before,
    as_hidden,
    information_lost,
    lost_gradient,
    origins_of,
)
from ampscope.analysis.diagnosis.unheard_operands import perhaps_made
from ampscope.analysis.op_facts import Executed
from ampscope.analysis.overview.bad_steps import Sighting
from ampscope.analysis.results import Incident, PathNode, Tried
from ampscope.analysis.step_graph import SiteTable, StepGraph, second_run
from ampscope.analysis.tables.lazy_tables import IncidentRows
from ampscope.analysis.tables.step_history import History
from ampscope.provenance import Origin
from ampscope.trace.evidence import Evidence
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, IncidentRow, Node, Phase, ReplayStatus, Source, Table, Trigger, source_of
from ampscope.trace.vocabulary import Cause

#: Origins of one step that are named besides the first.
MOST_OTHERS = 3


class Examiner:
    """Examines the incidents of one rank."""

    def __init__(self, run: Run, rank: int, history: Mapping[int, History]) -> None:
        self._run = run
        self._rank = rank
        self._history = history
        self._context = Context(history)
        self._sites = SiteTable(run, rank)
        self._rows = IncidentRows(run, rank)
        self._tried = trials.of_run(run, rank)
        self._half_weights = half_weights(run, rank)

    def examined(self, seen: Sighting) -> list[Examined]:
        """Returns the incidents of a sighting, one for each origin of its step, the one that matters most first."""
        row = self._row(seen)
        return self._examine(row) if seen.recorded else [self._without_origin(row)]

    def not_from_here(self, seen: Sighting, why: str) -> Examined:
        """Returns the incident of a sighting that began neither on this rank nor on another of which anything is known.

        Args:
            seen: What was seen.
            why: What is known of where it began.
        """
        row = self._row(seen)
        run = self._context.calibration(row)
        by_itself = run is not None and run.recovered and run.benign_cause is not Cause.BENIGN_SCALE_ADJUSTMENT
        return self._without_origin(row, run.benign_cause if run is not None and by_itself else Cause.UNKNOWN, why)

    def _row(self, seen: Sighting) -> IncidentRow:
        row = self._rows.find(seen.step, seen.optimizer, seen.trigger) if seen.recorded else None
        return row or _unreported_row(seen.step, seen.optimizer, seen.loss)

    @cached_property
    def _starts(self) -> frozenset[int]:
        """The steps with which the run began and was resumed; optimizers are numbered in the order of their steps."""
        events = self._run.rows(Table.EVENTS, rank=self._rank, kind=EventKind.RESUME)
        return frozenset({0, *(row.step for row in events)})

    def _examine(self, row: IncidentRow) -> list[Examined]:
        state = state_found(row)
        if state is not None:
            examined = examined_state(row, state, self._replayed(row))
            tried = self._tried.get((row.step, row.optimizer), ())
            return [examined._replace(incident=replace(examined.incident, tried=tried))]
        if still := still_found(row):
            return [examined_still(row, each, self._replayed(row)) for each in still]
        if row.trigger in (Trigger.LOST_GRADIENT, Trigger.INFORMATION_LOST):
            return [self._of_lost_gradient(row)] if row.trigger == Trigger.LOST_GRADIENT else self._of_values_lost(row)
        if row.trigger in (Trigger.EXCEPTION, Trigger.UPDATES_LOST):
            return [self._of_error(row) if row.trigger == Trigger.EXCEPTION else examined_held(row, self._rank)]
        graph, found = self._origins(row)
        if not found:
            return [as_write(row, self._calmed(row, self._without_origin(row)))]
        first = self._calmed(row, self._at_origin(row, graph, found[0], recognise(graph, found[0])))
        first = as_write(row, first._replace(leaves=left_by(graph, found)))
        return [first, *self._others(row, graph, found[1:], first.incident)]

    def _of_error(self, row: IncidentRow) -> Examined:
        graph, found = self._origins(row)
        led = self._at_origin(row, graph, found[0], recognise(graph, found[0])) if found else None
        is_known = led is not None and led.incident.cause is not Cause.UNKNOWN and not led.incident.cause.is_benign
        return led_to_error(led, row) if led is not None and is_known else raised(row, self._rank)

    def _of_values_lost(self, row: IncidentRow) -> list[Examined]:
        graph = StepGraph(self._run, self._sites, row.step, source_of(Source.LIVE, row.optimizer))
        casts = information_lost(graph, row)
        found = [as_cast_before(row, each[0].seq, self._at_origin(row, graph, *each)) for each in casts]
        return found or [self._without_origin(row)]

    def _of_lost_gradient(self, row: IncidentRow) -> Examined:
        lost = lost_gradient(self._run, self._sites, row)
        if lost is None:
            return self._without_origin(row, Cause.STAGNATION)
        return self._at_origin(row, lost.graph, lost.origin, lost.found)

    def _replayed(self, row: IncidentRow) -> StepGraph:
        """The faithful replay of the step of an incident, or of writes after it; empty where there is none."""
        source = Source.WRITE if Evidence.of(row).source is not None else Source.REPLAY
        return StepGraph(self._run, self._sites, row.step, source_of(source, row.optimizer))

    def _origins(self, row: IncidentRow) -> tuple[StepGraph, list[Origin]]:
        """The origins in the best execution of the step that the trace holds, the one that matters most first."""
        written = row.trigger == Trigger.NONFINITE_CARRIED
        for source in (Source.WRITE, Source.REPLAY) if written else (Source.REPLAY, Source.LIVE):
            graph = StepGraph(self._run, self._sites, row.step, source_of(source, row.optimizer))
            found = origins_of(row, graph)
            if found:
                break
        return graph, found

    def _others(
        self, row: IncidentRow, graph: StepGraph, further: Sequence[Origin], first: Incident
    ) -> Iterator[Examined]:
        """Further origins in the forward pass of the same step, which would have made it fail by themselves."""
        if first.phase != Phase.FORWARD or first.cause is Cause.HARDWARE_TRANSIENT:
            return
        named: set[int] = set()
        for origin in further[:MOST_OTHERS]:
            found = recognise(graph, origin)
            known = found.cause not in (Cause.UNKNOWN, Cause.BAD_WEIGHT, Cause.HARDWARE_TRANSIENT)
            if known and found.phase in (Phase.FORWARD, Phase.LOSS) and found.seq not in named:
                named.add(found.seq)
                other = self._at_origin(row, graph, origin, found)
                yield other._replace(incident=replace(other.incident, tried=()))

    def _at_origin(self, row: IncidentRow, graph: StepGraph, origin: Origin, found: Recognised) -> Examined:
        """An incident with its origin, the cause judged by its context."""
        tried = self._tried.get((row.step, row.optimizer), ())
        once = row.replay == ReplayStatus.NOT_REPRODUCED
        twice = second_run(graph, self._replayed(row), origin.seq) if once else None
        if found.cause is Cause.SCALE_OVERFLOW and not Executed(graph, found.seq).carries(row.scale or 1.0):
            found = replace(found, cause=Cause.FP16_OVERFLOW)
        found = self._context.judged(row, found, tried, twice)
        if found.cause is Cause.DIVERGENCE and (first := first_overflow(graph)) is not None:
            if isinstance(found.reason, LossGrew):  # then the step's first overflow tells, whatever came of it
                tried = (*tried, *trials.of_growing_loss(self._tried, row.step, row.optimizer))
                found = replace(found, seq=first.seq, phase=first.phase)
            elif first.cause is Cause.DIVERGENCE:
                found = first
        if isinstance(found.reason, CameIn):
            rows = Evidence.of(row).rows.get(found.reason.name, ()) if found.cause is Cause.BAD_INPUT else ()
            finite_at = Evidence.of(row).finite_at.get(found.reason.name)
            at_start = not row.optimizer and row.step in self._starts
            found = replace(found, reason=replace(found.reason, rows=rows, at_start=at_start, finite_at=finite_at))
        explicit = self._explicit_half(graph, found, tried)
        path = origin.path if found.seq == origin.seq else (found.seq, *origin.path)
        incident = replace(_incident(row, graph, found, explicit, tried), path=graph.path(path))
        incident = as_hidden(row, graph, origin, incident)
        return perhaps_made(row, Examined(incident, found.reason, explicit))

    def _explicit_half(self, graph: StepGraph, found: Recognised, tried: Sequence[Tried]) -> ExplicitHalf:
        """The half precision that the code asks for itself, where precision is what failed."""
        if not trials.by_precision(found.cause, tried):
            return ExplicitHalf()
        lost_by = _lost_by(found)
        return explicit_half.explicit_half(graph, found.seq if lost_by is None else lost_by, tried, self._half_weights)

    def _calmed(self, row: IncidentRow, examined: Examined) -> Examined:
        """A skip that is none of the run's worries.

        An overflow of scaled gradients is harmless where the scale was only calibrating. So is one skip that a replay
        which came out differently cannot explain, as long as it is the only one and training went on after it.
        """
        incident, run = examined.incident, self._context.calibration(row)
        if run is None or incident.cause not in (Cause.SCALE_OVERFLOW, Cause.UNKNOWN):
            return examined
        cause = run.benign_cause
        reason: Reason = ScaleFell(recovered=run.recovered)
        if incident.cause is Cause.UNKNOWN:
            if not run.is_single or row.replay != ReplayStatus.DIVERGED or self._rows.alike(row) > 1:
                return examined
            cause, reason = (
                Cause.BENIGN_SINGLE_SKIP,
                Unexplained(why=f"its replay came out differently: {row.replay_reason}"),
            )
        text = explanation(cause, Occurrence(op=incident.op, reason=reason))
        return Examined(replace(incident, severity=CATALOGUE[cause].severity, cause=cause, explanation=text))

    def _without_origin(self, row: IncidentRow, cause: Cause | None = None, why: str = "") -> Examined:
        """Returns the incident of a step of which no trace shows an origin."""
        cause = cause or self._context.cause_without_origin(row, self._tried.get((row.step, row.optimizer), ()))
        why = why or why_unknown(row)
        reduced = Evidence.of(row).reduction
        lost = reduced if reduced is not None and reduced.overflows else None
        lead = "It was lost on the way to the other ranks" if lost else "The origin is not known"
        advice = (wider_reduction(by_hook=bool(lost.hook)),) if lost else ()
        reason: Reason = Observed(sentence=f"{lead}: {why}.", advice=advice)
        if cause is Cause.BENIGN_SINGLE_SKIP:
            reason = Unexplained(why=why)
        phase = Phase.FORWARD if row.trigger == Trigger.NONFINITE_LOSS else Phase.BACKWARD
        incident = incident_at(cause, row.step, phase, told=Occurrence(reason=reason), row=row, rank=self._rank)
        return Examined(replace(incident, tried=self._tried.get((row.step, row.optimizer), ())), reason)


def _incident(
    row: IncidentRow, graph: StepGraph, found: Recognised, explicit: ExplicitHalf, tried: tuple[Tried, ...]
) -> Incident:
    came_in = found.cause is Cause.BAD_INPUT
    told = Occurrence(
        op=Node.INPUT if came_in else "",
        module=parameters_module(graph, found),
        reason=found.reason,
        masked=found.masked,
    )
    site = graph.place(found.seq) if came_in else graph.site(found.seq)
    incident = incident_at(
        found.cause, row.step, found.phase, told=told, row=row, graph=graph, seq=found.seq, site=site
    )
    return replace(
        incident,
        module_type=incident.module_type or graph.module_type(site),
        lost=_lost(graph, found),
        fp32_ok=trials.fp32_ok(tried) if graph.half else False,
        tried=tried,
        explanation=incident.explanation + explicit_half.in_words(explicit),
    )


def _lost(graph: StepGraph, found: Recognised) -> PathNode | None:
    """The op that lost what the op at the origin needs, unless that is the op itself."""
    by = _lost_by(found)
    return graph.path((by,))[0] if by is not None and by != found.seq else None


def _lost_by(found: Recognised) -> int | None:
    return found.reason.lost_by if isinstance(found.reason, LostBefore) else None


def _unreported_row(step: int, optimizer: int, loss: float | None) -> IncidentRow:
    """The row that a step without one would have."""
    return IncidentRow(
        step=step,
        optimizer=optimizer,
        segment=0,
        time=0.0,
        trigger=Trigger.NONFINITE_LOSS,
        loss=loss,
        scale=None,
        replay=ReplayStatus.UNAVAILABLE,
        replay_reason="no incident was recorded for this step",
        replay_s=0.0,
        bad_params=(),
        over_budget=False,
        evidence="{}",
    )
