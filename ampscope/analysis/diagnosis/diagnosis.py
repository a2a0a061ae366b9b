"""The verdict on a run traces each incident to its origin, names mistakes, and leaves harmless values alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ampscope.analysis.cures.going_back import with_files
from ampscope.analysis.cures.own_words import program_of
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.diagnosis.across_ranks import apart_replicas, examined_incidents
from ampscope.analysis.diagnosis.bad_state import without_consequences
from ampscope.analysis.diagnosis.examined import merged
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.diagnosis.loss_spikes import led_there, spikes
from ampscope.analysis.diagnosis.risks import risks
from ampscope.analysis.diagnosis.run_summary import checked, not_looked_at, recording_gaps, summary, unobserved
from ampscope.analysis.diagnosis.silent_failures import silent_failures
from ampscope.analysis.overview.bad_steps import World, sampled_rank, world_of
from ampscope.analysis.overview.last_good_step import last_good
from ampscope.analysis.overview.overview import cures_made, since_then
from ampscope.analysis.overview.rank_lives import ranks_in_numbers, ranks_story
from ampscope.analysis.overview.replicas import replicas
from ampscope.analysis.overview.saved_files import saved_files
from ampscope.analysis.results import Diagnosis, Finding, Incident, RunInfo, ScaleHealth, SourceLine
from ampscope.analysis.scale.health import healths
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.analysis.tables.step_history import History, histories
from ampscope.analysis.tables.traced_steps import first_traced_steps, only_recorded
from ampscope.analysis.usage.findings import findings, loop_steps, resumed_scalers
from ampscope.analysis.usage.mistakes import of_mistakes
from ampscope.provenance import Harmless, harmless_births
from ampscope.trace.read.find import told_name
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.read.table_queries import Chosen
from ampscope.trace.schema import ENTRY_NODES, Node, Phase, ReplayStatus, Source, Trigger, execution_of
from ampscope.trace.vocabulary import Cause, Severity, Verdict


def scale_incidents(
    found: Sequence[ScaleHealth], others: Sequence[Incident], history: Mapping[int, History]
) -> list[Incident]:
    """Failures of the scale that no incident of the same steps explains."""
    told = [each for each in others if each.severity is not Severity.INFO]
    return [
        _scale_incident(health, history[health.optimizer])
        for health in found
        if health.severity is not Severity.INFO and not any(each.last_step >= health.first_step for each in told)
    ]


def _scale_incident(health: ScaleHealth, history: History) -> Incident:
    return replace(
        incident_at(Cause.SCALE_OVERFLOW, health.first_step, Phase.BACKWARD),
        last_step=health.last_step,
        count=int(history.skipped[history.step >= health.first_step].sum()) or 1,
        severity=health.severity,
        trigger=Trigger.NONFINITE_GRADIENT,
        explanation=health.explanation,
        remedies=health.remedies or remedies(Cause.SCALE_OVERFLOW),
    )


#: Traced steps that are looked through: what is harmless is so in every step.
LOOKED_THROUGH = 3

_CAUSES = {
    Harmless.MASK: Cause.BENIGN_INF_MASK,
    Harmless.SATURATED: Cause.BENIGN_SATURATED,
    Harmless.MASKED: Cause.BENIGN_MASKED_INTERNAL,
    Harmless.UNUSED: Cause.BENIGN_METRIC_NAN,
}


def harmless_values(run: Run, sites: SiteTable, failures: Iterable[Incident] = ()) -> list[Incident]:
    """Masks, masked values and metrics that are not finite, as incidents of severity ``info``.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        failures: What else is told: a line that is to blame is not harmless when it runs again, as a checkpoint's does.
    """
    found: dict[Cause, Incident] = {}
    blamed = {_place(each) for each in failures if each.severity is not Severity.INFO}
    for each in first_traced_steps(run, rank=sites.rank, count=LOOKED_THROUGH):
        if execution_of(each.source)[0] == Source.REPLAY_FP32:  # what did not happen is nobody's worry
            continue
        graph = StepGraph(run, sites, each.step, each.source)
        for seq, why in harmless_births(graph):
            incident = _incident(graph, seq, _CAUSES[why])
            if _place(incident) not in blamed:
                found.setdefault(incident.cause, incident)
    return list(found.values())


def _place(incident: Incident) -> tuple[str, str, SourceLine | None]:
    return incident.op, incident.module, incident.source


def _incident(graph: StepGraph, seq: int, cause: Cause) -> Incident:
    return replace(incident_at(cause, graph.step, graph=graph, seq=seq, site=graph.place(seq)), path=())


def diagnose(run: Run | str | os.PathLike[str], *, engine: Chosen = "duckdb") -> Diagnosis:
    """Diagnoses a run.

    Args:
        run: An open run, or the path of its folder.
        engine: What the tables of a folder are queried with, as for `open_run`; an open run has its own.

    Returns:
        The diagnosis, as ``ampscope diagnose --json`` prints it.

    Raises:
        RunError: The folder cannot be read.
        EngineError: the engine is unknown or cannot be had.
    """
    if isinstance(run, Run):
        return _diagnose(run, whole=True)
    with open_run(run, engine=engine) as opened:
        return _diagnose(opened, whole=True)


def judged(run: Run) -> Diagnosis:
    """The verdict on a run and what it rests on, without what harms nothing, and what led there.

    What is told has no `Incident.last_good`, and the ranks of a job have no story.

    Raises:
        RunDamaged: a part of it cannot be read.
    """
    return _diagnose(run, whole=False)


def _diagnose(run: Run, *, whole: bool) -> Diagnosis:
    world = world_of(run)
    sampled = sampled_rank(run, world)
    history = histories(run, sampled)
    sites = SiteTable(run, sampled)
    examined = merged(without_consequences(examined_incidents(run, world)), program_of(run))
    lost = any(each.trigger == Trigger.LOST_GRADIENT for each in examined)
    held = frozenset(name for each in examined if each.trigger == Trigger.UPDATES_LOST for name in each.tripped)
    silent = silent_failures(run, sites, history, lost=lost, held=held)
    outliers = spikes(run, sites, history, examined)
    failures = [*silent, *led_there(examined, outliers)]
    ahead = risks(run, sites, history, failures)
    harmless = harmless_values(run, sites, failures) if whole else []
    incidents = [*failures, *harmless, *outliers, *ahead, *apart_replicas(run)]
    scale = healths(run, sampled, history)
    resumed = list(resumed_scalers(run, sampled))
    of_loop = loop_steps(resumed if len(history) == 1 else ())  # optimizers count their steps apart
    incidents = [
        replace(each, world=world.size, loop_step=of_loop(each.step))
        for each in [*incidents, *scale_incidents(scale, incidents, history)]
    ]
    mistakes = tuple(
        replace(each, world=world.size, loop_step=of_loop(each.step))
        for each in findings(run, sampled, history, resumed)
        if _holds(run, each)
    )
    incidents = sorted(of_mistakes(incidents, mistakes), key=lambda each: (each.step, each.rank))
    primary = _primary(incidents, mistakes)
    if whole and isinstance(primary, Incident):
        told = replace(primary, last_good=last_good(run, primary))
        incidents = [told if each is primary else each for each in incidents]
        primary = told
    saved = saved_files(run, incidents, history) if whole else None
    if saved is not None:
        first = primary
        incidents = [with_files(each, saved, is_primary=each is first) for each in incidents]
        mistakes = tuple(with_files(each, saved, is_primary=each is first) for each in mistakes)
        primary = _primary(incidents, mistakes)
    newest = max((int(each.step[-1]) for each in history.values() if each.step.size), default=0)
    info = replace(run_info(run, world, history), loop_step=of_loop(newest))
    cures = cures_made(run, sampled)
    gaps = recording_gaps(run, world)
    unseen = "" if primary else unobserved(run, sampled, info.steps)
    looked, unlooked = checked(run, sampled), not_looked_at(run)
    if primary is None or _is_risk(primary):  # what is not known may be worse than what is expected
        unseen = unseen or gaps
    return Diagnosis(
        run=info,
        verdict=_verdict(primary, unseen, unlooked),
        summary=unseen or summary(primary, info, looked, incidents=incidents, unlooked=unlooked),
        primary=primary,
        incidents=tuple(incidents),
        findings=mistakes,
        scale=scale,
        checked=looked,
        unobserved=unlooked,
        saved=saved,
        note=" ".join(
            filter(None, (only_recorded(run), "" if unseen else gaps, *(unlooked if primary or unseen else ())))
        ),
        ranks=ranks_story(ranks_in_numbers(run)) if whole and world.is_shared else (),
        cures=cures,
        since=since_then(run, sampled, primary, incidents=incidents, cures=cures, history=history),
    )


def _verdict(primary: Incident | Finding | None, unseen: str, unlooked: Sequence[str]) -> Verdict:
    if unseen:
        return Verdict.NOT_OBSERVED
    if primary is None:
        return Verdict.PARTLY_OBSERVED if unlooked else Verdict.HEALTHY
    return Verdict.AT_RISK if _is_risk(primary) else Verdict.PROBLEM


def _is_risk(entry: Incident | Finding) -> bool:
    """Whether nothing is broken by it: a value that is about to overflow, a schedule that is some steps ahead."""
    ahead = entry.cause is Cause.MISUSE_SCHEDULER_ORDER and entry.severity is Severity.WARNING
    return entry.cause.is_ahead or ahead


def run_info(run: Run, world: World, history: Mapping[int, History]) -> RunInfo:
    """The facts of a run.

    Args:
        run: The run.
        world: Its ranks.
        history: The steps of one of them, by optimizer.
    """
    manifest = run.manifest
    return RunInfo(
        path=str(run.path),
        name=told_name(run.path, manifest.name),
        created=manifest.created,
        status=run.status,
        steps=sum(each.step.size for each in history.values()),
        skipped=sum(int(each.skipped.sum()) for each in history.values()),
        segments=len(manifest.segments),
        device=manifest.device,
        model=manifest.model,
        parameters=manifest.parameters,
        versions={**manifest.versions, "ampscope": manifest.ampscope},
        world=world.size,
        missing=world.missing,
    )


def _primary(incidents: Sequence[Incident], mistakes: Sequence[Finding]) -> Incident | Finding | None:
    """Picks the entry to tell first: errors before warnings, what happened before what will, then the earliest.

    A mistake comes before the failure that it leads to.

    A missing scaler leads to gradients that are too small. It has no part in a value that the forward itself made:
    where such a value broke a step, that is what broke the run, whenever the mistake was first seen.
    """
    made_in_forward = any(each.severity is Severity.ERROR and _made_in_forward(each) for each in incidents)
    blamed = [each for each in mistakes if not (made_in_forward and each.cause is Cause.MISUSE_MISSING_SCALER)]
    entries: list[Incident | Finding] = [*blamed, *incidents]
    matter = [entry for entry in entries if entry.severity is not Severity.INFO]
    order = {Severity.ERROR: 0, Severity.WARNING: 1}
    chosen = sorted(matter, key=lambda each: (order[each.severity], *_due(each), each.rank))
    first = next(iter(chosen), None)
    return next((each for each in chosen if _explains(each, first)), first)


def _explains(entry: Incident | Finding, first: Incident | Finding | None) -> bool:
    """Whether a later step that failed alike has an origin, and an earlier one none.

    That one could not be run again, or was given what the loop had computed while nobody followed it. An op that made a
    bad value of finite operands did not meet what the earlier one may have left.
    """
    if not isinstance(first, Incident) or not isinstance(entry, Incident) or first.cause is not Cause.UNKNOWN:
        return False
    known = bool(entry.op) and entry.cause is not Cause.UNKNOWN and entry.op not in ENTRY_NODES
    alike = known and entry.trigger == first.trigger and entry.severity is first.severity
    if first.op == Node.INPUT:
        return alike and entry.traced.startswith(Source.WRITE)
    unseen = not first.op and first.replay == ReplayStatus.UNAVAILABLE
    return alike and unseen and first.trigger == Trigger.NONFINITE_GRADIENT


def _holds(run: Run, mistake: Finding) -> bool:
    """Whether ranks do not agree, where gradients that are not reduced were seen: a loop may do that by itself."""
    ranks = replicas(run)
    return mistake.cause is not Cause.RANKS_NOT_REDUCED or not ranks.groups or bool(ranks.apart)


#: A schedule runs ahead by the steps that something else has skipped.
_FOLLOW = frozenset({Cause.NOTHING_TRAINS, Cause.MISUSE_SCHEDULER_ORDER})


def _due(entry: Incident | Finding) -> tuple[bool, bool, bool, int]:
    """Whether another failure would be why, or worse; whether it is a risk alone; when it was, or is to be expected."""
    expected = entry.forecast_step if isinstance(entry, Incident) else None
    in_part = isinstance(entry, Incident) and entry.trigger == Trigger.LOST_GRADIENT  # and the step was made
    step = entry.step if expected is None else expected
    return entry.cause in _FOLLOW, _is_risk(entry), in_part, step


def _made_in_forward(incident: Incident) -> bool:
    """Whether an op of the forward or of the loss made the value that was not finite."""
    of_value = incident.trigger in (Trigger.NONFINITE_LOSS, Trigger.NONFINITE_GRADIENT, Trigger.NONFINITE_BUFFER)
    return of_value and incident.phase == Phase.FORWARD and incident.op != "" and incident.op not in ENTRY_NODES
