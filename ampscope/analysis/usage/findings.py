"""Usage mistakes are those that capture saw as they happened, and those that only the run's history shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import narwhals as nw
import numpy as np

from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Reason
from ampscope.analysis.causes.unknown import Observed
from ampscope.analysis.causes.usage import LearningRateMoved, MistakeSeen, ScaleForgotten
from ampscope.analysis.cures import own_words
from ampscope.analysis.cures.own_words import program_of
from ampscope.analysis.results import Finding, SourceLine
from ampscope.analysis.tables.lazy_tables import collect, collect_rows
from ampscope.analysis.tables.step_history import History, recorded_rates
from ampscope.analysis.usage.mistakes import explained, fixes, happens_once, severity
from ampscope.trace.dtypes import FLOAT8, HALF_DTYPES
from ampscope.trace.evidence import NO_EVIDENCE, FindingEvidence
from ampscope.trace.read.run import Run
from ampscope.trace.schema import (
    FindingRow,
    Phase,
    ScalerAction,
    ScalerEventRow,
    SiteRow,
    Source,
    Table,
    execution_of,
    said,
)
from ampscope.trace.schema.tables import details
from ampscope.trace.vocabulary import Cause, MistakeForm, Severity

#: What changes no scale, and of which a long run has millions.
_ROUTINE = ", ".join(f"'{action}'" for action in (ScalerAction.UNSCALE, ScalerAction.SKIP))
#: The order of what happens to a scaler at one moment of one step.
_ORDER = [str(action) for action in ScalerAction]
#: Events that may share the newest moment and step of a scaler.
_MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedScaler:
    """A scaler of a resumed segment."""

    start: ScalerEventRow  #: how it began
    last: float | None  #: the newest other scale that the run had found; None where it was given a state while watched
    saved_at: tuple[int, ...]  #: steps before which the run had saved the state that it begins with

    @property
    def goes_on(self) -> bool:
        """Whether it has a state that the run had: the newest, or that of a checkpoint."""
        return self.last is None or bool(self.saved_at)


def resumed_scalers(run: Run, rank: int) -> Iterator[ResumedScaler]:
    """Every scaler of a resumed run that takes the place of one before it."""
    loads = run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.STATE_LOADED)
    loaded = {(event.segment, event.scaler): event for event in loads}
    optimizers = run.rows(Table.FINDINGS, rank=rank, cause=Cause.MISUSE_SCALER_STATE_NOT_RESTORED)
    for start, before in _resumed(run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.INIT)):
        load = loaded.get((start.segment, start.scaler))
        last = _last_scale(run, rank, start.segment - 1, before[-1]) if load is None else None
        made = max((steps_made(row) for row in optimizers if row.segment == start.segment), default=0)
        saved = dict.fromkeys(step for step in _saved_at(run, rank, load or start, before) if step >= max(made, 1))
        other = last if start.scale_after not in (None, last) else None
        yield ResumedScaler(start=start, last=other, saved_at=tuple(saved))


def steps_made(row: FindingRow) -> int:
    """How many steps an optimizer had behind it when a scaler without a past began to serve it; 0: none known."""
    return FindingEvidence.of_row(row).optimizer_steps or 0


def loop_steps(scalers: Sequence[ResumedScaler]) -> Callable[[int], int | None]:
    """A function from a step of the run to the loop's own number of it, where the checkpoint tells another.

    Args:
        scalers: Those of the run; what a checkpoint says of its loop counts where one alone can be meant.
    """
    known = {each.start.step: each.saved_at[0] for each in reversed(scalers) if len(each.saved_at) == 1}
    starts = sorted({each.start.step for each in scalers})
    ahead: dict[int, int | None] = {}  # of each resumed segment, how far the run's numbers are ahead

    def in_loop(step: int) -> int | None:
        shift = next((ahead[start] for start in reversed(starts) if start <= step), 0)
        return step - shift if shift is not None else None

    for start in starts:
        latest = in_loop(known[start] - 1) if start in known else None  # that the checkpoint knows
        ahead[start] = start - latest - 1 if latest is not None else None
    return lambda step: own if (own := in_loop(step)) != step else None


def _resumed(starts: Sequence[ScalerEventRow]) -> Iterator[tuple[ScalerEventRow, list[int]]]:
    """The beginning of each scaler of a resumed segment, with the numbers of the scalers whose place it takes.

    A segment's scalers take the places of those of the segment before in the order in which they first scaled.
    """
    scalers: dict[int, list[int]] = {}
    for start in starts:
        scalers.setdefault(start.segment, []).append(start.scaler)
    for start in starts:
        place = scalers[start.segment].index(start.scaler)
        if place < len(scalers.get(start.segment - 1, ())):
            segments = (scalers.get(segment, []) for segment in range(start.segment))
            yield start, [each[place] for each in segments if place < len(each)]


def _saved_at(run: Run, rank: int, began: ScalerEventRow, scalers: Sequence[int]) -> list[int]:
    """The steps before which one of these scalers saved the state with which another one began, or was loaded."""
    if began.scale_after is None or not math.isfinite(began.scale_after):
        return []
    tracker = details(began.detail).get("_growth_tracker", began.growth_tracker)
    found = collect_rows(
        run.table(Table.SCALER_EVENTS, rank=rank),
        "step, detail",
        where=f"action = '{ScalerAction.STATE_SAVED}' AND scale_after = {began.scale_after!r} "
        f"AND scaler IN ({', '.join(map(str, scalers))})",
        order="step",
    )
    return [int(step) for step, detail in found if tracker in (None, details(detail).get("_growth_tracker"))]


def _last_scale(run: Run, rank: int, segment: int, scaler: int) -> float | None:
    """The newest scale that is known of a scaler; None where none is."""
    found = collect_rows(
        run.table(Table.SCALER_EVENTS, rank=rank),
        "time, step, action, scale_after",
        where=f"segment = {segment} AND scaler = {scaler} AND scale_after IS NOT NULL AND action NOT IN ({_ROUTINE})",
        order="time DESC, step DESC",
        limit=_MOST_AT_ONCE,
    )
    known = sorted((time, step, _ORDER.index(action), scale) for time, step, action, scale in found if action in _ORDER)
    return float(known[-1][3]) if known else None


_HALF = frozenset((*HALF_DTYPES, *FLOAT8))
_FLOATS = frozenset(("float32", "float64"))
#: Parts of the names of ops that autocast runs in half precision wherever a region is on.
_CAST = ("mm", "linear", "convolution", "conv", "matmul", "attention")


def ops_by_dtype(run: Run, rank: int, sites: Sequence[SiteRow]) -> tuple[tuple[str, int], ...] | None:
    """How many floating-point ops of the traced steps gave which dtype, most first; None where some was in half."""
    if any(not _HALF.isdisjoint((*site.in_dtypes, *site.out_dtypes)) for site in sites):
        return None
    ops = filter(_is_op, sites)
    gives = {site.site: next((each for each in site.out_dtypes if each in _FLOATS), "") for site in ops}
    table = run.table(Table.OPS, rank=rank)
    found: Counter[str] = Counter()
    for site, source, count in collect_rows(table, "site, source, count(*) AS ops", "site, source"):
        if execution_of(source)[0] == Source.LIVE and gives.get(site):
            found[gives[site]] += count
    return tuple(found.most_common())


def without_region(sites: Sequence[SiteRow], history: Mapping[int, History]) -> MistakeForm | None:
    """How mixed precision came to nothing, of a run without an op in half; None where nobody asked for it."""
    ops = [site for site in sites if site.phase == Phase.FORWARD and _is_op(site)]
    forward = [site for site in ops if not _FLOATS.isdisjoint(site.out_dtypes)]
    castable = [site for site in forward if any(part in site.op for part in _CAST)]
    within = any(site.autocast for site in sites if site.phase in (Phase.FORWARD, Phase.LOSS))
    scaled = any(bool(np.isfinite(each.scale).any()) for each in history.values())
    if castable and all(not site.autocast for site in castable) and (within or scaled):
        return MistakeForm.AUTOCAST_OUTSIDE
    return MistakeForm.AUTOCAST_FLOAT32 if within and forward and all(site.autocast for site in forward) else None


def _is_op(site: SiteRow) -> bool:
    return "." in site.op  # others are pseudo-ops


def moved_after_skips(run: Run, rank: int, history: History) -> Iterator[int]:
    """The skipped steps after which the next attempt has another learning rate, in any parameter group.

    Args:
        run: The run.
        rank: One of its ranks.
        history: The steps of one of that rank's optimizers.
    """
    skips = np.flatnonzero(history.skipped[:-1])
    if not skips.size:
        return
    asked = history.step[np.union1d(skips, skips + 1)].tolist()
    told = recorded_rates(run, rank, history.optimizer, nw.col("step").is_in(asked))
    for place in skips.tolist():
        step, after = (int(each) for each in history.step[place : place + 2])
        was, now = (float(each) for each in history.lr[place : place + 2])
        if _differ(was, now) or _groups_differ(told.get(step), was, told.get(after), now):
            yield step


def _groups_differ(was: Mapping[str, Any] | None, first: float, now: Mapping[str, Any] | None, later: float) -> bool:
    """Whether a group's rate is another; one that is not told is that of the first group."""
    names = dict.fromkeys((*(was or {}), *(now or {})))
    return any(_differ(_rate(was, name, first), _rate(now, name, later)) for name in names)


def _rate(told: Mapping[str, Any] | None, group: str, first: float) -> float:
    rate = first if told is None else told.get(group)
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def _differ(was: float, now: float) -> bool:
    return was != now and not math.isnan(was) and not math.isnan(now)


#: Mistakes that bring others with them: shown first.
_ROOTS = frozenset({Cause.MISUSE_AUTOCAST_SPANS_STEP})
#: Skipped steps with which a run begins that say nothing of its schedule: from 2**16, a scaler's own start, to 2**11.
_USUAL_CALIBRATION = 5
#: Shares of all steps by which a schedule is ahead: from the first on it is a warning, from the second on a problem.
_MATTERS, _HEAVY = 0.1, 0.4


def findings(
    run: Run, rank: int, history: Mapping[int, History], resumed: Sequence[ResumedScaler]
) -> tuple[Finding, ...]:
    """Every usage mistake of the run, the first first; what several ranks do is one mistake.

    Args:
        run: The run.
        rank: One of its ranks, whose history tells of mistakes that capture did not see.
        history: The steps of that rank, by optimizer.
        resumed: Its scalers that took over in a resumed run.
    """
    writers = [each for each in run.ranks if run.stamp(Table.FINDINGS, rank=each)]
    taken_down = [(each, row) for each in writers for row in run.rows(Table.FINDINGS, rank=each)]
    rows = [(by, row) for by, row in taken_down if _costs_steps(row, history) and not _is_over(run, by, row)]
    forgotten = {each.start.segment: _started_afresh(each) for each in resumed if not each.goes_on}
    known = {each.start.segment for each in resumed}  # better than by whether the optimizer had a past
    rows = [
        (by, row)
        for by, row in rows
        if row.cause != _FORGOTTEN or row.segment not in (known if steps_made(row) else forgotten)
    ]
    recorded = [replace(_with_count(_recorded(row), run, rank, history), rank=by) for by, row in rows]
    by_history = [replace(each, rank=rank) for each in (*forgotten.values(), *_recomputed_otherwise(run, rank))]
    of_amp = [replace(each, rank=rank) for each in _amp_without_effect(run, rank, history, taken_down)]
    at_rest = [replace(each, rank=rank) for each in _at_rest(run, rank, history)]
    found = _with_weights(_joined_by_rank([*recorded, *by_history, *of_amp, *at_rest]), run)
    return tuple(sorted(found, key=lambda finding: (finding.step, finding.cause not in _ROOTS)))


#: In the code of the remedy that such a diff writes into the program.
_WIDENED = "model.float()"


def _with_weights(found: Sequence[Finding], run: Run) -> list[Finding]:
    """With the model's weights in float32 as a diff, where their dtype is the mistake: made in another line than it."""
    if all(each.cause is not Cause.HALF_PARAMS for each in found):
        return list(found)
    program = program_of(run)
    mended = []
    for each in found:
        diff = own_words.of_weights(program, each.source) if each.cause is Cause.HALF_PARAMS and each.source else None
        advice = tuple(
            replace(remedy, diff=remedy.diff or (diff if _WIDENED in remedy.code else None)) for remedy in each.remedies
        )
        mended.append(replace(each, remedies=advice))
    return mended


def _joined_by_rank(found: Sequence[Finding]) -> list[Finding]:
    """The same mistake on several ranks as one, of the rank that made it first."""
    kept: dict[tuple[object, ...], Finding] = {}
    for each in sorted(found, key=lambda each: (each.step, each.rank)):
        key = (each.cause, each.source, each.explanation)
        first = kept.get(key)
        if first is None or each.rank in (first.rank, *first.also_on):
            kept[key if first is None else (*key, len(kept))] = each
        else:
            kept[key] = replace(first, also_on=tuple(sorted((*first.also_on, each.rank))))
    return list(kept.values())


_FORGOTTEN = Cause.MISUSE_SCALER_STATE_NOT_RESTORED


def _recorded(row: FindingRow) -> Finding:
    evidence = FindingEvidence.of_row(row)
    cause = said(Cause, row.cause, Cause.UNKNOWN)
    form = MistakeForm(row.form) if row.form in MistakeForm._value2member_map_ else None
    seen = MistakeSeen(seen=evidence)
    reason = Observed(sentence=f"evidence: {details(row.evidence)}") if cause is Cause.UNKNOWN else seen
    return _finding(cause, row.step, SourceLine.of(row), form=form, reason=reason, framework=evidence.framework)


def _is_over(run: Run, rank: int, row: FindingRow) -> bool:
    """Whether gradients have reached an optimizer after all, or it is `_amp_without_effect` that tells of the row."""
    if row.cause != Cause.NOTHING_TRAINS or FindingEvidence.of_row(row).learns:
        return row.cause == Cause.AMP_WITHOUT_EFFECT
    came = f"segment = {row.segment} AND coalesce(clipped_grad_norm, grad_norm) > 0 AND NOT skipped"
    return bool(collect_rows(run.table(Table.STEPS, rank=rank), "step", where=came, limit=1))


def _amp_without_effect(
    run: Run, rank: int, history: Mapping[int, History], taken_down: Sequence[tuple[int, FindingRow]]
) -> list[Finding]:
    """Mixed precision without effect, as far as traced steps do not show one."""
    seen = next((row for _, row in taken_down if row.cause == Cause.AMP_WITHOUT_EFFECT), None)
    sites = run.rows(Table.SITES, rank=rank)
    ops = ops_by_dtype(run, rank, sites)
    form = said(MistakeForm, seen.form, MistakeForm.AUTOCAST_OUTSIDE) if seen else without_region(sites, history)
    if ops is None or form is None or not (seen or ops):
        return []
    step, place = (seen.step, SourceLine.of(seen)) if seen else (0, None)
    reason = MistakeSeen(seen=FindingEvidence.of_row(seen) if seen else NO_EVIDENCE, ops=ops)
    return [_finding(Cause.AMP_WITHOUT_EFFECT, step, place, form=form, reason=reason)]


#: Steps at a learning rate of zero with which a run may end, and their share of it: a schedule ends at zero.
_MOST_AT_REST, _MOST_OF_RUN = 15, 0.2


def _at_rest(run: Run, rank: int, history: Mapping[int, History]) -> Iterator[Finding]:
    """A run that has trained and ends with a learning rate of zero in every group of every optimizer."""
    if any(not each.lr.size or each.lr[-1] != 0.0 for each in history.values()):
        return
    rests, of = [], 0
    for number, each in history.items():
        moving = np.flatnonzero(~(each.lr == 0.0))  # a rate that was not recorded says nothing
        others = max(recorded_rates(run, rank, number, nw.col("lr") == 0.0), default=-1)
        last = max(int(each.step[moving[-1]]) if moving.size else -1, others)
        rests.append(each.step[each.step > last])
        of += each.step.size
    count = sum(each.size for each in rests)
    if rests and all(each.size for each in rests) and _MOST_AT_REST < count < of and count > _MOST_OF_RUN * of:
        reason = MistakeSeen(seen=FindingEvidence(attempts=count))
        first = min(int(each[0]) for each in rests)
        yield _finding(Cause.NOTHING_TRAINS, first, None, form=MistakeForm.LEARNING_RATE_ENDED, reason=reason)


def _finding(
    cause: Cause,
    step: int,
    source: SourceLine | None,
    *,
    form: MistakeForm | None = None,
    reason: Reason = NOTHING_MORE,
    framework: str = "",
) -> Finding:
    return Finding(
        step=step,
        last_step=step,
        count=1,
        counted=happens_once(cause, form),
        severity=severity(cause, form),
        cause=cause,
        source=source,
        explanation=explained(cause, form, reason),
        remedies=fixes(cause, form, source, framework, reason),
    )


def _costs_steps(row: FindingRow, history: Mapping[int, History]) -> bool:
    """Whether a scaler without a past did any harm: an optimizer's past alone may be that of another training."""
    if row.cause != _FORGOTTEN or FindingEvidence.of_row(row).optimizer_steps is None:
        return True
    return any(bool(each.skipped[each.step == row.step].any()) for each in history.values())


def _with_count(finding: Finding, run: Run, rank: int, history: Mapping[int, History]) -> Finding:
    """A scheduler's mistake with the number of steps on which a learning rate moved for nothing, and its cost."""
    if finding.cause is not Cause.MISUSE_SCHEDULER_ORDER:
        return finding
    moved = ((each, list(moved_after_skips(run, rank, each))) for each in history.values() if each.step.size)
    since = [(each, [step for step in steps if step >= finding.step]) for each, steps in moved]
    worst, steps = max(since, key=lambda each: len(each[1]) / each[0].step.size, default=(None, []))
    severity = _cost(steps, worst) if worst is not None else Severity.INFO
    of = worst.step.size if worst is not None else 0
    reason = LearningRateMoved(steps=len(steps), of=of, matters=severity is not Severity.INFO)
    told = replace(finding, severity=severity, explanation=explained(finding.cause, None, reason))
    return replace(told, last_step=max(steps), count=len(steps), counted=True) if steps else told


def _cost(for_nothing: Sequence[int], history: History) -> Severity:
    """How much it matters that a learning rate moved after skipped steps: a scale that finds its place costs a few."""
    share = len(for_nothing) / history.step.size
    until = history.skipped[history.step <= max(for_nothing, default=-1)]
    calibrates = until.size <= _USUAL_CALIBRATION and bool(until.all())
    if share < _MATTERS or calibrates:
        return Severity.INFO
    return Severity.ERROR if share >= _HEAVY else Severity.WARNING


def _started_afresh(resumed: ResumedScaler) -> Finding:
    start = resumed.start
    known = start.scale_after is not None
    reason = ScaleForgotten(was=resumed.last or 0.0, starts=start.scale_after or 0.0) if known else NOTHING_MORE
    return _finding(_FORGOTTEN, start.step, SourceLine.of(start), reason=reason)


def _recomputed_otherwise(run: Run, rank: int) -> list[Finding]:
    """A checkpointed module or line whose recomputation ran in another precision than their forward."""
    sites = run.rows(Table.SITES, rank=rank)
    if any(site.phase == Phase.RECOMPUTE for site in sites):
        as_it_was = _seen_as_it_was(run, rank)
        sites = [site for site in sites if site.site in as_it_was]
    forward: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for site in sites:
        if site.phase == Phase.FORWARD:
            forward.setdefault(_place(site), set()).add(_precision(site))
    again = [site for site in sites if site.phase == Phase.RECOMPUTE]
    other = next(
        (each for each in again if _precision(each) not in forward.get(_place(each), {_precision(each)})), None
    )
    return [_finding(Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH, 0, SourceLine.of(other))] if other else []


def _seen_as_it_was(run: Run, rank: int) -> set[int]:
    """Numbers of the program points that a step as it was has come by, not only one tried in another precision."""
    ops = collect(run.table(Table.OPS, rank=rank).select("site", "source").unique())
    tried = str(Source.REPLAY_FP32)
    return {row["site"] for row in ops if execution_of(row["source"])[0] != tried}


def _precision(site: SiteRow) -> tuple[str, ...]:
    """In which precision an op ran: its region, or what it gave; a recomputed line outside modules has no region."""
    return (site.autocast,) if site.module else tuple(site.out_dtypes)


def _place(site: SiteRow) -> tuple[str, ...]:
    """Returns a key that forward and recomputation share: an op of a module, or of a line outside all modules."""
    return (site.op, site.module) if site.module else (site.op, site.file, str(site.line))
