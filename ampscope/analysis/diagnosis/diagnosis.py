"""The verdict on a run: every incident traced to its origin, every mistake in its use, and what to tell first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ampscope.analysis.diagnosis.examined import merged
from ampscope.analysis.diagnosis.examiner import Examiner
from ampscope.analysis.diagnosis.harmless_values import harmless_values
from ampscope.analysis.diagnosis.run_summary import summary
from ampscope.analysis.diagnosis.silent_failures import silent_failures
from ampscope.analysis.diagnosis.unobserved import unobserved
from ampscope.analysis.origin.step_graph import Sites
from ampscope.analysis.results import Diagnosis, Finding, Incident, RunInfo
from ampscope.analysis.scale.health import healths, scale_incidents
from ampscope.analysis.tables.step_history import History, histories
from ampscope.analysis.usage.findings import findings
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.vocabulary import Severity, Verdict


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
    examined = [each for rank in ranks for each in Examiner(run, rank, by_rank[rank]).examined()]
    sites = Sites(run, ranks[0])
    silent = silent_failures(run, sites, by_rank[ranks[0]])
    incidents = [*silent, *merged(examined), *harmless_values(run, sites)]
    scale = healths(run, ranks[0], by_rank[ranks[0]])
    incidents = sorted([*incidents, *scale_incidents(scale, incidents)], key=lambda each: each.step)
    mistakes = findings(run, by_rank[ranks[0]])
    primary = _primary(incidents, mistakes)
    info = run_info(run, by_rank[ranks[0]])
    benign = sum(incident.cause.is_benign for incident in incidents)
    unseen = "" if primary else unobserved(run, ranks[0], info.steps)
    return Diagnosis(
        run=info,
        verdict=Verdict.PROBLEM if primary else Verdict.NOT_OBSERVED if unseen else Verdict.HEALTHY,
        summary=unseen or summary(primary, steps=info.steps, skipped=info.skipped, benign=benign),
        primary=primary,
        incidents=tuple(incidents),
        findings=mistakes,
        scale=scale,
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
    matter = [entry for entry in entries if entry.severity is not Severity.INFO]
    order = {Severity.ERROR: 0, Severity.WARNING: 1}
    return min(matter, key=lambda entry: (order[entry.severity], entry.step), default=None)
