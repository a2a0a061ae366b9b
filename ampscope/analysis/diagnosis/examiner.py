"""Examines the incidents of a run one by one: the origin, the cause in its context, and what was tried on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ampscope.analysis.cures import trials
from ampscope.analysis.cures.own_half import half_weights, own_half
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.diagnosis import sentences
from ampscope.analysis.origin import origin_cause
from ampscope.analysis.origin.origin_cause import Explained
from ampscope.analysis.origin.step_graph import Sites, StepGraph, source_line
from ampscope.analysis.results import Incident, PathNode
from ampscope.analysis.scale import skip_runs
from ampscope.analysis.tables.step_history import History
from ampscope.provenance import Origin, absorbed, origins
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run
from ampscope.trace.schema import IncidentRow, Node, Phase, ReplayStatus, Source, Table, Trigger, source_of
from ampscope.trace.vocabulary import Cause, Severity

#: Incidents examined op by op; a run with more is summed up from these.
MAX_EXAMINED = 60
#: Origins of one step that are told besides the first.
MOST_OTHERS = 3
#: A loss that rose at each of the last steps, by this factor in all, is running away.
RUNAWAY_STEPS = 3
RUNAWAY_FACTOR = 100.0


class _Symptom(NamedTuple):
    """What was noticed of an incident, without looking for its origin."""

    optimizer: int
    trigger: str
    tripped: tuple[str, ...]


class Examined(NamedTuple):
    """An incident, with the facts from which its remedies are made."""

    incident: Incident
    facts: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two incidents one."""
        incident = self.incident
        if incident.cause.is_benign:
            return (incident.cause,)
        place = (incident.source.file, incident.source.line) if incident.source else None
        return (incident.cause, incident.op, incident.module, incident.phase, place)

    def repeated(self, step: int) -> Examined:
        """The same at another step, at which nothing was tried."""
        return self._replace(incident=replace(self.incident, step=step, last_step=step, tried=()))

    def joined(self, later: Incident) -> Examined:
        """With another occurrence counted in."""
        incident = self.incident
        known = incident.fp32_ok if incident.fp32_ok is not None else later.fp32_ok
        both = (*incident.tried, *later.tried)
        joined = replace(incident, last_step=later.step, count=incident.count + 1, fp32_ok=known, tried=both)
        return self._replace(incident=joined)

    def with_remedies(self) -> Incident:
        """The incident with what cures it."""
        incident = self.incident
        if incident.cause.is_benign:
            return incident
        advice = remedies(
            incident.cause, op=incident.op, module=incident.module, facts=self.facts, tried=incident.tried
        )
        return replace(incident, remedies=advice)


class Examiner:
    """Examines the incidents of one rank, in order.

    Args:
        run: The run.
        rank: The rank.
        history: Its steps, by optimizer.
    """

    def __init__(self, run: Run, rank: int, history: Mapping[int, History]) -> None:
        self._run = run
        self._rank = rank
        self._history = history
        self._sites = Sites(run, rank)
        self._tried = trials.trials(run, rank)
        self._half_weights = half_weights(run, rank)
        self._skips = {optimizer: skip_runs.skip_runs(each) for optimizer, each in history.items()}

    def examined(self) -> list[Examined]:
        """Every incident row with its origin, and bad losses that no incident row speaks of."""
        rows = self._run.rows(Table.INCIDENTS, rank=self._rank)
        found: list[Examined] = []
        alike: dict[_Symptom, Examined] = {}
        for number, row in enumerate(rows):
            symptom = _Symptom(row.optimizer, row.trigger, row.bad_params)
            known = alike.get(symptom)
            if known is not None and (number >= MAX_EXAMINED or row.over_budget):
                found.append(known.repeated(row.step))
            elif number < MAX_EXAMINED:
                examined = self._examine(row)
                found += examined
                alike[symptom] = examined[0]
        return [*found, *self._unreported(rows)]

    def _unreported(self, rows: Sequence[IncidentRow]) -> Iterator[Examined]:
        """Steps whose loss was not finite although capture reported nothing (its replay may have been off)."""
        for optimizer, history in self._history.items():
            reported = {row.step for row in rows if row.optimizer == optimizer}
            bad = history.step[history.bad_loss]
            left = [int(step) for step in bad if step not in reported][:MAX_EXAMINED]
            for step in left:
                position = int(np.searchsorted(history.step, step))
                yield self._without_origin(_silent(step, optimizer, float(history.loss[position])))

    def _examine(self, row: IncidentRow) -> list[Examined]:
        """An incident by its origin; where the step had several, by each, the one that matters most first."""
        graph, born = self._origins(row)
        if not born:
            return [self._without_origin(row)]
        first = self._calmed(row, self._described(row, graph, born[0], origin_cause.explain(graph, born[0])))
        return [first, *self._others(row, graph, born[1:], first.incident)]

    def _origins(self, row: IncidentRow) -> tuple[StepGraph, list[Origin]]:
        """The origins in the best execution of the step that the trace holds, the one that matters most first."""
        for source in (Source.REPLAY, Source.LIVE):
            graph = StepGraph(self._run, self._sites, row.step, source_of(source, row.optimizer))
            born = absorbed(graph) if row.trigger == Trigger.ABSORBED_OVERFLOW else origins(graph)
            if born:
                break
        return graph, born

    def _others(
        self, row: IncidentRow, graph: StepGraph, born: Sequence[Origin], first: Incident
    ) -> Iterator[Examined]:
        """Further origins in the forward pass of the same step, which would have made it fail by themselves."""
        if first.phase != Phase.FORWARD or first.cause is Cause.HARDWARE_TRANSIENT:
            return
        told: set[int] = set()
        for origin in born[:MOST_OTHERS]:
            explained = origin_cause.explain(graph, origin)
            known = explained.cause not in (Cause.UNKNOWN, Cause.BAD_WEIGHT, Cause.HARDWARE_TRANSIENT)
            if known and explained.phase in (Phase.FORWARD, Phase.LOSS) and explained.seq not in told:
                told.add(explained.seq)
                other = self._described(row, graph, origin, explained)
                yield other._replace(incident=replace(other.incident, tried=()))

    def _described(self, row: IncidentRow, graph: StepGraph, origin: Origin, explained: Explained) -> Examined:
        cause, facts = self._in_context(row, explained)
        if cause is Cause.BAD_INPUT:
            facts = facts | _rows_of(row, str(facts.get("name")))
        if cause is Cause.DIVERGENCE:
            explained = origin_cause.first_overflow(graph) or explained
        site = graph.place(explained.seq) if cause is Cause.BAD_INPUT else graph.site(explained.seq)
        op, module = Node.INPUT if cause is Cause.BAD_INPUT else site.op, site.module
        tried = self._tried.get((row.step, row.optimizer), ())
        if trials.by_precision(cause, tried):
            own = own_half(graph, facts.get("lost_by", explained.seq), tried, self._half_weights)
            facts = facts | {"own": own}
        path = origin.path if explained.seq == origin.seq else (explained.seq, *origin.path)
        incident = Incident(
            step=row.step,
            last_step=row.step,
            count=1,
            severity=Severity.ERROR,
            cause=cause,
            phase=Phase.FORWARD if explained.phase == Phase.LOSS else explained.phase,
            op=op,
            module=module,
            module_type=graph.module_type(site),
            source=source_line(site),
            inputs=graph.operands(explained.seq),
            outputs=graph.results(explained.seq),
            path=graph.path(path),
            lost=_lost(graph, explained.seq, facts.get("lost_by")),
            replay=row.replay,
            replay_reason=row.replay_reason,
            traced=graph.source,
            fp32_ok=trials.fp32_ok(tried) if graph.half else False,
            tried=tried,
            trigger=row.trigger,
            tripped=row.bad_params,
            explanation=sentences.explanation(cause, op, facts),
        )
        return Examined(incident, facts)

    def _in_context(self, row: IncidentRow, explained: Explained) -> tuple[Cause, dict[str, Any]]:
        """The cause in the light of what else is known of the run.

        An overflow at the end of a runaway loss is divergence; what an identical second run did not do is transient;
        without a scaler, no loss scale is to blame.
        """
        if row.replay == ReplayStatus.NOT_REPRODUCED:
            return Cause.HARDWARE_TRANSIENT, {}
        overflow = explained.cause in (Cause.FP16_OVERFLOW, Cause.SCALE_OVERFLOW)
        if overflow and self._ran_away(row):
            return Cause.DIVERGENCE, {}
        if explained.cause is Cause.SCALE_OVERFLOW and row.scale is None:
            return Cause.FP16_OVERFLOW, explained.facts
        return explained.cause, explained.facts

    def _ran_away(self, row: IncidentRow) -> bool:
        history = self._history.get(row.optimizer)
        losses = history.before(row.step, RUNAWAY_STEPS) if history is not None else np.empty(0)
        rising = losses.size > 1 and (np.diff(losses) > 0).all()
        return bool(rising and losses[-1] / losses[0] >= RUNAWAY_FACTOR)

    def _calmed(self, row: IncidentRow, examined: Examined) -> Examined:
        """An overflow of scaled gradients is harmless where the scale was only calibrating."""
        incident = examined.incident
        if incident.cause is not Cause.SCALE_OVERFLOW or incident.trigger != Trigger.NONFINITE_GRADIENT:
            return examined
        run = next((r for r in self._skips.get(row.optimizer, ()) if r.first <= row.step <= r.last), None)
        if run is None or not run.calibrates:
            return examined
        cause = run.benign_cause
        explanation = sentences.explanation(cause, incident.op, {})
        return Examined(replace(incident, severity=Severity.INFO, cause=cause, explanation=explanation), {})

    def _adjusts(self, row: IncidentRow) -> Cause | None:
        """What to call a skip that could not be run again, where a smaller scale was all that the next steps took."""
        if row.replay != ReplayStatus.UNAVAILABLE or row.trigger != Trigger.NONFINITE_GRADIENT or row.scale is None:
            return None
        run = next((r for r in self._skips.get(row.optimizer, ()) if r.first <= row.step <= r.last), None)
        return run.benign_cause if run is not None and run.calibrates and run.recovered else None

    def _without_origin(self, row: IncidentRow) -> Examined:
        """What can be said when no trace of the step shows an origin."""
        transient = row.replay == ReplayStatus.NOT_REPRODUCED
        cause = Cause.HARDWARE_TRANSIENT if transient else self._adjusts(row) or Cause.UNKNOWN
        why = row.replay_reason or "no trace of this step shows where the value was born"
        incident = Incident(
            step=row.step,
            last_step=row.step,
            count=1,
            severity=Severity.INFO if cause.is_benign else Severity.ERROR,
            cause=cause,
            phase=Phase.FORWARD if row.trigger == Trigger.NONFINITE_LOSS else Phase.BACKWARD,
            op="",
            module="",
            module_type="",
            source=None,
            replay=row.replay,
            replay_reason=row.replay_reason,
            tried=self._tried.get((row.step, row.optimizer), ()),
            trigger=row.trigger,
            tripped=row.bad_params,
            explanation=sentences.explanation(cause, "", {"why": f"The origin is not known: {why}."}),
        )
        return Examined(incident, {})


def _lost(graph: StepGraph, seq: int, by: int | None) -> PathNode | None:
    """The op that lost an operand of ``seq``, unless that is the op itself."""
    return graph.path((by,))[0] if by is not None and by != seq else None


def _silent(step: int, optimizer: int, loss: float) -> IncidentRow:
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


def _rows_of(row: IncidentRow, name: str) -> dict[str, str]:
    """Which rows of an input were bad, as a fact to tell; empty where capture did not look."""
    rows = details(row.evidence).get("rows")
    found = rows.get(name, ()) if isinstance(rows, dict) else ()
    return {"rows": ", ".join(map(str, found))} if found else {}


def merged(examined: Iterable[Examined]) -> list[Incident]:
    """Repeats of one origin as one incident with count and span, in the order of their steps, with their remedies.

    The first keeps its details; what was tried on any of them counts for all.
    """
    kept: dict[tuple[Any, ...], Examined] = {}
    for each in sorted(examined, key=lambda each: each.incident.step):
        first = kept.get(each.key)
        kept[each.key] = first.joined(each.incident) if first else each
    return [each.with_remedies() for each in kept.values()]
