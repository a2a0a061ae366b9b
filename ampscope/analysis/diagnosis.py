"""The verdict on a run: every incident traced to its origin, every mistake in its use, and what to tell first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ampscope.analysis import causes, sentences, skips
from ampscope.analysis.causes import Explained
from ampscope.analysis.findings import findings
from ampscope.analysis.history import History, histories
from ampscope.analysis.remedies import remedies
from ampscope.analysis.results import Diagnosis, Finding, Incident, RunInfo
from ampscope.analysis.stepgraph import Sites, StepGraph, source_line
from ampscope.provenance import Origin, absorbed, origins
from ampscope.trace.reader import Run, open_run
from ampscope.trace.schema import (
    IncidentRow,
    Node,
    Phase,
    ReplayStatus,
    Source,
    Table,
    Trigger,
)
from ampscope.trace.vocabulary import Cause, Severity, Verdict

#: Incidents examined op by op; a run with more is summed up from these.
MAX_EXAMINED = 60
#: A loss that grew this much from one step to the next, several times in a row, is running away.
RUNAWAY_FACTOR = 10.0


def diagnose(run: Run | str | os.PathLike[str]) -> Diagnosis:
    """Diagnoses a run.

    Args:
        run: An open run, or the path of its folder.

    Returns:
        The diagnosis, as ``ampscope diagnose --json`` prints it.

    Raises:
        RunError: The folder cannot be read.
    """
    if isinstance(run, Run):
        return _diagnose(run)
    with open_run(run) as opened:
        return _diagnose(opened)


def _diagnose(run: Run) -> Diagnosis:
    ranks = run.ranks or [0]
    by_rank = {rank: histories(run, rank) for rank in ranks}
    examined = [incident for rank in ranks for incident in _Examiner(run, rank, by_rank[rank]).incidents()]
    incidents = _merged(sorted(examined, key=lambda incident: incident.step))
    mistakes = findings(run, by_rank[ranks[0]])
    primary = _primary(incidents, mistakes)
    info = run_info(run, by_rank[ranks[0]])
    benign = sum(incident.cause.is_benign for incident in incidents)
    return Diagnosis(
        run=info,
        verdict=Verdict.PROBLEM if primary else Verdict.HEALTHY,
        summary=sentences.summary(primary, steps=info.steps, skipped=info.skipped, benign=benign),
        primary=primary,
        incidents=tuple(incidents),
        findings=mistakes,
    )


def run_info(run: Run, history: Mapping[int, History]) -> RunInfo:
    """The facts of a run.

    Args:
        run: The run.
        history: The steps of its first rank, by optimizer.
    """
    manifest = run.manifest
    return RunInfo(
        path=str(run.path),
        name=manifest.name,
        created=manifest.created,
        status=run.status,
        steps=sum(each.step.size for each in history.values()),
        skipped=sum(int(each.skipped.sum()) for each in history.values()),
        segments=len(manifest.segments),
        device=manifest.device,
        model=manifest.model,
        parameters=manifest.parameters,
        versions={**manifest.versions, "ampscope": manifest.ampscope},
    )


def _primary(incidents: Sequence[Incident], mistakes: Sequence[Finding]) -> Incident | Finding | None:
    """What to tell first: errors before warnings, then the earliest; a mistake before the failure it leads to."""
    entries: list[Incident | Finding] = [*mistakes, *incidents]
    told = [entry for entry in entries if entry.severity is not Severity.INFO]
    order = {Severity.ERROR: 0, Severity.WARNING: 1}
    return min(told, key=lambda entry: (order[entry.severity], entry.step), default=None)


class _Examiner:
    """Examines the incidents of one rank, in order."""

    def __init__(self, run: Run, rank: int, history: Mapping[int, History]) -> None:
        self._run = run
        self._rank = rank
        self._history = history
        self._sites = Sites(run, rank)
        self._skips = {optimizer: skips.skip_runs(each) for optimizer, each in history.items()}

    def incidents(self) -> list[Incident]:
        """Every incident row with its origin, and bad losses that no incident row speaks of."""
        rows = self._run.rows(Table.INCIDENTS, rank=self._rank)
        return [*(self._incident(row) for row in rows[:MAX_EXAMINED]), *self._unreported(rows)]

    def _unreported(self, rows: Sequence[IncidentRow]) -> Iterator[Incident]:
        """Steps whose loss was not finite although capture reported nothing (its replay may have been off)."""
        for optimizer, history in self._history.items():
            reported = {row.step for row in rows if row.optimizer == optimizer}
            bad = history.step[history.has_loss & ~np.isfinite(history.loss)]
            left = [int(step) for step in bad if step not in reported][:MAX_EXAMINED]
            for step in left:
                position = int(np.searchsorted(history.step, step))
                yield self._without_origin(_silent(step, optimizer, float(history.loss[position])))

    def _incident(self, row: IncidentRow) -> Incident:
        found = self._origin(row)
        if found is None:
            return self._without_origin(row)
        graph, origin, explained = found
        incident = self._described(row, graph, origin, explained)
        return self._calmed(row, incident)

    def _origin(self, row: IncidentRow) -> tuple[StepGraph, Origin, Explained] | None:
        """The origin that matters most, in the best execution of the step that the trace holds."""
        for source in (Source.REPLAY, Source.LIVE):
            graph = StepGraph(self._run, self._sites, row.step, source)
            born = absorbed(graph) if row.trigger == Trigger.ABSORBED_OVERFLOW else origins(graph)
            if born:
                return graph, born[0], causes.explain(graph, born[0])
        return None

    def _described(self, row: IncidentRow, graph: StepGraph, origin: Origin, explained: Explained) -> Incident:
        cause, facts = self._in_context(row, explained)
        if cause is Cause.DIVERGENCE:
            explained = causes.first_overflow(graph) or explained
        site = graph.site(explained.seq)
        op, module = site.op, site.module
        if cause is Cause.BAD_INPUT:
            reader = graph.first_reader(explained.seq)
            module = graph.site(reader).module if reader is not None else module
            op = Node.INPUT
        path = origin.path if explained.seq == origin.seq else (explained.seq, *origin.path)
        return Incident(
            step=row.step,
            last_step=row.step,
            count=1,
            severity=Severity.ERROR,
            cause=cause,
            phase=Phase.FORWARD if explained.phase == Phase.LOSS else explained.phase,
            op=op,
            module=module,
            module_type=site.module_type,
            source=source_line(site),
            inputs=graph.operands(explained.seq),
            outputs=graph.results(explained.seq),
            path=graph.path(path),
            replay=row.replay,
            replay_reason=row.replay_reason,
            traced=graph.source,
            trigger=row.trigger,
            tripped=tuple(json.loads(row.evidence).get("params", ())),
            explanation=sentences.explanation(cause, op, facts),
            remedies=remedies(cause, op=op, module=module, facts=facts),
        )

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
        losses = history.before(row.step, 3) if history is not None else np.empty(0)
        return bool(losses.size > 1 and (losses[1:] / losses[:-1] > RUNAWAY_FACTOR).all())

    def _calmed(self, row: IncidentRow, incident: Incident) -> Incident:
        """An overflow of scaled gradients is harmless where the scale was only calibrating."""
        if incident.cause is not Cause.SCALE_OVERFLOW or incident.trigger != Trigger.NONFINITE_GRADIENT:
            return incident
        run = next((r for r in self._skips.get(row.optimizer, ()) if r.first <= row.step <= r.last), None)
        if run is None or not run.calibrates:
            return incident
        cause = run.benign_cause
        return replace(
            incident,
            severity=Severity.INFO,
            cause=cause,
            explanation=sentences.explanation(cause, incident.op, {}),
            remedies=(),
        )

    def _without_origin(self, row: IncidentRow) -> Incident:
        """What can be said when no trace of the step shows an origin."""
        transient = row.replay == ReplayStatus.NOT_REPRODUCED
        cause = Cause.HARDWARE_TRANSIENT if transient else Cause.UNKNOWN
        why = row.replay_reason or "no trace of this step shows where the value was born"
        return Incident(
            step=row.step,
            last_step=row.step,
            count=1,
            severity=Severity.ERROR,
            cause=cause,
            phase=Phase.FORWARD if row.trigger == Trigger.NONFINITE_LOSS else Phase.BACKWARD,
            op="",
            module="",
            module_type="",
            source=None,
            replay=row.replay,
            replay_reason=row.replay_reason,
            trigger=row.trigger,
            tripped=tuple(json.loads(row.evidence).get("params", ())),
            explanation=sentences.explanation(cause, "", {"why": f"The origin is not known: {why}."}),
            remedies=remedies(cause),
        )


def _silent(step: int, optimizer: int, loss: float) -> IncidentRow:
    """The row that a step without one would have."""
    reason = "no incident was recorded for this step"
    unavailable = ReplayStatus.UNAVAILABLE
    return IncidentRow(step, optimizer, 0, 0.0, Trigger.NONFINITE_LOSS, loss, None, unavailable, reason, 0.0, "{}")


def _merged(incidents: Sequence[Incident]) -> list[Incident]:
    """Repeats of one origin as one incident, with count and span; the first keeps its details."""
    kept: dict[tuple[Any, ...], Incident] = {}
    for incident in incidents:
        place = (incident.source.file, incident.source.line) if incident.source else None
        key: tuple[Any, ...] = (incident.cause, incident.op, incident.module, incident.phase, place)
        if incident.cause.is_benign:
            key = (incident.cause,)
        first = kept.get(key)
        kept[key] = replace(first, last_step=incident.step, count=first.count + 1) if first else incident
    return list(kept.values())
