"""A run in sentences: what was found in it, and of what it recorded nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import narwhals as nw

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.cures import trials
from ampscope.analysis.overview.bad_steps import World, steps_by_rank
from ampscope.analysis.results import Checked, Finding, Incident, RunInfo, SourceLine
from ampscope.analysis.tables.lazy_tables import collect, collect_rows
from ampscope.analysis.triggers import words_of
from ampscope.analysis.words import (
    capitalized,
    counted,
    first_ranked,
    further_in_words,
    op_in_words,
    ranks_in_words,
    received_in_words,
    when_in_words,
)
from ampscope.trace.files.folder_lock import is_locked
from ampscope.trace.files.layout import rank_folder
from ampscope.trace.files.recording_end import recording_ends
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table, Trigger
from ampscope.trace.vocabulary import (
    BESIDE,
    DEVICE_FAILED,
    LOOK_EVERY,
    STATE_LOOK,
    STEP_RECORD,
    STEP_TAPE,
    SWITCHED_OFF,
    Cause,
)

#: What a loss scale does by itself.
SCALE_AT_WORK = frozenset(
    {Cause.BENIGN_INITIAL_CALIBRATION, Cause.BENIGN_PERIODIC_GROWTH, Cause.BENIGN_SCALE_ADJUSTMENT}
)


def summary(
    primary: Incident | Finding | None,
    run: RunInfo,
    checked: Checked,
    *,
    incidents: Sequence[Incident],
    unlooked: Sequence[str] = (),
) -> str:
    """The one sentence on a run.

    Args:
        primary: What to tell first.
        run: Its extent.
        checked: How much of it was looked at.
        incidents: All of them.
        unlooked: Why not all was looked at, in sentences.
    """
    made = counted(run.steps, "step")
    if primary is None:
        causes = {each.cause for each in incidents}
        jumped = next(
            (f" From step {each.step:,} on the gradient norm is far larger." for each in incidents if each.lasting), ""
        )
        by_scale = not SCALE_AT_WORK.isdisjoint(causes) and Cause.BENIGN_SINGLE_SKIP not in causes
        why = " while the loss scale found its place" if by_scale else ""
        skipped = f" ({run.skipped:,} skipped{why})" if run.skipped else ""
        seen = " that was seen" if unlooked else ""
        return " ".join((f"No numerical fault{seen} in {made}{skipped}; {_checked(run, checked)}.{jumped}", *unlooked))
    if isinstance(primary, Finding):
        when = when_in_words(primary)
        where = f",{_at(primary.source)}" if primary.source else ""
        return f"{capitalized(when)}{where}: {primary.explanation}"
    if primary.cause.is_ahead:
        return f"Nothing is wrong yet in {made}. {primary.explanation}{_at_risk_in(primary)}"
    effect = _effect(primary)
    elsewhere = f"{further_in_words(primary)} {received_in_words(primary)}".strip()
    if primary.cause is Cause.REPLICA_APART and len(primary.also_on) + 1 == primary.world:  # nobody is to blame
        return primary.explanation
    if not primary.op:
        where = _at(primary.source) if primary.trigger == Trigger.EXCEPTION else ""
        return " ".join(filter(None, (f"Step {primary.step} {effect}{where}.", primary.explanation, elsewhere)))
    outside = "the model itself" if primary.module_type else "the loss code"
    where = f"module {primary.module}" if primary.module else outside
    where = "the optimizer" if primary.phase == "optimizer" else where
    lead = f"Step {primary.step} {effect}: {op_in_words(primary.op)} in {where}{_at(primary.source)} is the origin"
    told = (f"{lead} ({primary.phase}).", primary.explanation, trials.in_words(primary), elsewhere)
    return " ".join(filter(None, told))


def _checked(run: RunInfo, checked: Checked) -> str:
    """How much was looked at, and what was not, as a clause."""
    every = "it" if run.steps == 1 else "all"
    parts = {"ops": checked.traced, "gradients": checked.gradients}
    seen = [f"{name} in {every if n >= run.steps else f'{n:,} of them'}" for name, n in parts.items() if n]
    seen += [f"weights at {counted(checked.state_looks, 'look')}"] if checked.state_looks else []
    unseen = ["ops (no step was traced)"] if not checked.traced else []
    unseen += ["gradients"] if not checked.gradients else []
    unseen += ["weights"] if not checked.state_looks else []
    unseen += [f"{counted(checked.lost, 'step')} that the trace lacks"] if checked.lost else []
    unseen += [ranks_in_words(run.missing)] if run.missing else []
    told = (("checked", seen), ("not checked", unseen))
    return "; ".join(f"{word}: {', '.join(parts)}" for word, parts in told if parts)


def what_happened(primary: Incident | Finding) -> str:
    """States an incident or finding in a sentence, without place and reason: those are said where they belong."""
    if isinstance(primary, Finding):
        return f"{capitalized(item_in_words(primary))}."
    if primary.cause.is_ahead:
        return "Nothing is wrong yet."
    if primary.cause.is_benign:
        return ""
    return f"Step {primary.step:,} {_effect(primary)}."


def _effect(primary: Incident) -> str:
    effect = "stood far out" if primary.cause is Cause.SPIKE else words_of(primary.trigger).effect
    effect = f"began {item_in_words(primary)}" if primary.lasting else effect
    return " ".join(filter(None, (effect, first_ranked(primary))))


def _at_risk_in(warning: Incident) -> str:
    """States in a sentence where a failure that is warned of would happen."""
    where = " ".join(filter(None, (f"module {warning.module}" if warning.module else "", _at(warning.source).strip())))
    return f" It is in {where}." if warning.module else f" It is {where}." if where else ""


def _at(source: SourceLine | None) -> str:
    if source is None:
        return ""
    name = source.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f" at {name}:{source.line}"


_STARTING = "Nothing was observed yet: the process is alive, and no optimizer step of the model was seen so far."
_NO_STEP = (
    "Nothing was observed: no optimizer step of the watched model was seen. Call ampscope.watch in the process that "
    "trains, before its loop, with the very model that it trains. A loop whose weights follow no gradient that torch "
    "computed backwards (finite differences, forward-mode derivatives) is not seen."
)
_FAULT = (
    "That is a fault of AMPscope, which the training does not feel: report it with this text, and watch the next run "
    "to know."
)
_OF_DEVICE = (
    "That is an error of the training's own: run it with CUDA_LAUNCH_BLOCKING=1, and the traceback shows what failed."
)
#: Parts that are told one by one.
_MOST_TOLD = 12
_JUDGED = "grad_norm IS NOT NULL OR found_inf IS NOT NULL OR averaged IS NOT NULL"
#: As `StateWatch` has it: after steps 0, 1, 2, 4, ... and then every so many, where the optimizer stepped.
_LOOKED = f"NOT skipped AND (step % {LOOK_EVERY} = 0 OR (step < {LOOK_EVERY} AND (step & (step - 1)) = 0))"


def checked(run: Run, rank: int) -> Checked:
    """How much of a run was looked at, counted from the rows of a rank."""
    off = f"starts_with(text, '{STATE_LOOK} {SWITCHED_OFF}')"
    ends = f"count(CASE WHEN kind = '{EventKind.CLOSE}' THEN 1 END), min(CASE WHEN {off} THEN step END)"
    ((closed, until),) = collect_rows(run.table(Table.EVENTS, rank=rank), ends)
    looked = _LOOKED if until is None else f"{_LOOKED} AND step < {until}"
    counts = f"count_if(traced <> ''), count_if({_JUDGED}), count_if({looked}), max(step) - min(step) + 1 - count(*)"
    sums = collect_rows(run.table(Table.STEPS, rank=rank), f"optimizer, {counts}", "optimizer")
    _, traced, gradients, looks, lost = (sum(column) for column in zip(*sums, strict=True)) if sums else [0] * 5
    return Checked(traced=traced, gradients=gradients, state_looks=looks + (closed if until is None else 0), lost=lost)


def unobserved(run: Run, rank: int, steps: int) -> str:
    """Why nothing can be said of a run, with what to do; empty where it was observed.

    Args:
        run: The run.
        rank: Whose steps count.
        steps: How many attempts it recorded.
    """
    ended = _ended_early(run, rank, steps)
    if ended or not steps:
        return ended or (_STARTING if run.status == "open" else _NO_STEP)
    told = [event for event in run.rows(Table.EVENTS, rank=rank) if event.kind in (EventKind.UNSEEN, EventKind.SEEN)]
    if not told or told[-1].kind == EventKind.SEEN or told[-1].segment < _last(run, rank, "segment"):
        return ""
    many = f"{steps:,} steps were" if steps > 1 else "1 step was"
    return f"{many} recorded, but not what they computed: {told[-1].text}."


def not_looked_at(run: Run) -> tuple[str, ...]:
    """Why not all of a run was looked at that should have been, in sentences; such a run is not just healthy."""
    where = f"kind = '{EventKind.WARNING}' AND contains(text, '{SWITCHED_OFF}')"
    columns = 'text, min(step) AS since, list(DISTINCT "rank") AS ranks'
    found = collect_rows(run.table(Table.EVENTS), columns, "text", where=where, order="since, text", limit=_MOST_TOLD)
    off = [each for each in found if not each[0].startswith(BESIDE)]
    told = [_told_off(text, step, ranks if len(run.ranks) > 1 else ()) for text, step, ranks in off]
    return *told, *dict.fromkeys(_whose(text) for text, *_ in off)


def recording_gaps(run: Run, world: World) -> str:
    """Parts of a run that were to be recorded and were not, with what to do; such a run is never called healthy."""
    steps, found = steps_by_rank(run), []
    for rank in world.present:
        last = steps[rank].last if rank in steps else None
        whose = f" on rank {rank:,}" if world.is_shared else ""
        for end in recording_ends(rank_folder(run.path, rank)):
            since = "before the first step" if last is None else f"after step {last:,}"
            if any(segment.started > end.time for segment in run.manifest.segments):
                since = "in an earlier part of the run"
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.time))
            found.append(
                f"Recording ended{whose} {since}, at {at} ({end.why}): what the training did then is not known. "
                "Make room, or give dir= a folder on another disk, and watch again."
            )
    silent = [rank for rank in world.present if rank not in steps and not is_locked(rank_folder(run.path, rank))]
    if silent and len(silent) < len(world.present):
        alone = "" if len(world.present) - len(silent) > 1 else ", so nothing was compared"
        who = ranks_in_words(silent)
        found.append(
            f"{capitalized(who)} recorded no step{alone}: a process that ended right after ampscope.watch, or "
            "that never called the model. Its own output tells why."
        )
    return " ".join(found)


def _told_off(text: str, step: int, ranks: Sequence[int]) -> str:
    of = f" of {ranks_in_words(ranks)}" if ranks else ""
    left = " From there on losses and gradients were judged, and little else." if text.startswith(STEP_TAPE) else ""
    return f"At step {step:,}{of} {text}.{left}"


def _ended_early(run: Run, rank: int, steps: int) -> str:
    """Why the end of a run was not recorded; empty where capture lasted as long as the run."""
    newest = _last(run, rank, "segment") if steps else 0
    warnings = [event for event in run.rows(Table.EVENTS, rank=rank, kind=EventKind.WARNING) if event.segment >= newest]
    record = next((event for event in warnings if event.text.startswith(f"{STEP_RECORD} {SWITCHED_OFF}")), None)
    if record is None:
        return ""
    return f"Nothing is known of the run from step {record.step:,} on: {record.text}. {_whose(record.text)}"


def _whose(text: str) -> str:
    """Says whose fault it was that a part switched itself off, and what to do."""
    return _OF_DEVICE if DEVICE_FAILED in text else _FAULT


def _last(run: Run, rank: int, column: str) -> int:
    """The newest step, or the newest segment that made steps."""
    (found,) = collect(run.table(Table.STEPS, rank=rank).select(nw.col(column).max()))
    return int(found[column])
