"""The verdict on a run: every incident traced to its origin, every mistake in its use, and what to tell first."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ampscope.analysis import causes, sentences, skips
from ampscope.analysis.causes import Explained
from ampscope.analysis.findings import findings
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
    StepRow,
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
    steps = run.rows(Table.STEPS, rank=min(run.ranks, default=0))
    examined = [incident for rank in run.ranks for incident in _Examiner(run, rank).incidents()]
    incidents = _merged(sorted(examined, key=lambda incident: incident.step))
    mistakes = findings(run)
    primary = _primary(incidents, mistakes)
    info = run_info(run, steps)
    benign = sum(incident.cause.is_benign for incident in incidents)
    return Diagnosis(
        run=info,
        verdict=Verdict.PROBLEM if primary else Verdict.HEALTHY,
        summary=sentences.summary(primary, steps=info.steps, skipped=info.skipped, benign=benign),
        primary=primary,
        incidents=tuple(incidents),
        findings=mistakes,
    )


def run_info(run: Run, steps: Sequence[StepRow]) -> RunInfo:
    """The facts of a run."""
    manifest = run.manifest
    return RunInfo(
        path=str(run.path),
        name=manifest.name,
        created=manifest.created,
        status=run.status,
        steps=len(steps),
        skipped=sum(row.skipped for row in steps),
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

    def __init__(self, run: Run, rank: int) -> None:
        steps = run.rows(Table.STEPS, rank=rank)
        self._run = run
        self._rank = rank
        self._sites = Sites(run, rank)
        self._losses = [row.loss for row in steps if row.loss is not None]
        self._skips = {
            optimizer: skips.skip_runs([row for row in steps if row.optimizer == optimizer])
            for optimizer in {row.optimizer for row in steps}
        }

    def incidents(self) -> list[Incident]:
        """Every incident row with its origin; steps that died with the process have none."""
        rows = self._run.rows(Table.INCIDENTS, rank=self._rank)
        return [self._incident(row) for row in rows[:MAX_EXAMINED]]

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
        """The cause in the light of the run's history: an overflow at the end of a runaway loss is divergence."""
        overflow = explained.cause in (Cause.FP16_OVERFLOW, Cause.SCALE_OVERFLOW)
        if overflow and self._ran_away(row.step):
            return Cause.DIVERGENCE, explained.facts
        return explained.cause, explained.facts

    def _ran_away(self, step: int) -> bool:
        before = [loss for loss in self._losses[max(0, step - 3) : step] if loss > 0]
        grew = [later / earlier > RUNAWAY_FACTOR for earlier, later in pairwise(before)]
        return len(grew) >= 1 and all(grew)

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
