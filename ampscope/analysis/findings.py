"""Usage mistakes: those that capture saw as they happened, and those that only the run's history shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ampscope.analysis.history import History
from ampscope.analysis.remedies import remedies
from ampscope.analysis.results import Finding, SourceLine
from ampscope.analysis.stepgraph import source_line
from ampscope.trace.reader import Run
from ampscope.trace.schema import FindingRow, Phase, ScalerAction, ScalerEventRow, SiteRow, Table
from ampscope.trace.vocabulary import Cause, Severity

#: Share of healthy steps after which the learning rate must move for its scheduler to count as one of every step.
PER_STEP_SCHEDULER = 0.5

_EXPLAINED: dict[Cause, str] = {
    Cause.MISUSE_CLIP_BEFORE_UNSCALE: (
        "The gradients still carry the loss scale here, so the clipping threshold is compared with a norm that is "
        "too large by that factor, and the update shrinks by as much."
    ),
    Cause.MISUSE_NO_UNSCALE: "optimizer.step() ran on gradients that still carry the loss scale.",
    Cause.MISUSE_UPDATE_EACH_MICROBATCH: (
        "update() ends an optimizer step. Called for every micro-batch, the next backward adds scaled gradients to "
        "gradients that are already unscaled, and unscale_ divides the older ones again."
    ),
    Cause.MISUSE_BACKWARD_UNDER_AUTOCAST: (
        "backward ran inside the autocast block, so backward ops whose forward was kept in float32 are cast to half "
        "precision too, with the scaled gradient as operand."
    ),
    Cause.MISUSE_AUTOCAST_SPANS_STEP: (
        "The autocast region is not left between optimizer steps. Autocast keeps the weights it has cast until the "
        "region ends, so the next forward runs on half-precision copies of the old weights."
    ),
    Cause.MISUSE_MULTIPLE_SCALERS_UPDATE: (
        "Gradients are unscaled with another scale than their loss was scaled with: update() changed it in between, "
        "or another scaler did the scaling. Call update() once, after every optimizer has stepped, on the one scaler."
    ),
    Cause.HALF_PARAMS: (
        "The parameters themselves are float16, so their gradients are too, and a GradScaler cannot unscale those. "
        "Autocast wants float32 parameters and casts them op by op."
    ),
    Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH: (
        "A checkpointed block is recomputed in backward in another precision than it ran in forward, so the gradients "
        "belong to other activations than the loss."
    ),
    Cause.MISUSE_MISSING_SCALER: "The forward runs in float16 but the loss is not scaled: small gradients become 0.",
}


def findings(run: Run, history: Mapping[int, History]) -> tuple[Finding, ...]:
    """Every usage mistake of the run, the first first.

    Args:
        run: The run.
        history: The steps of its first rank, by optimizer.
    """
    events = run.rows(Table.SCALER_EVENTS, rank=min(run.ranks, default=0))
    found = [_seen(row) for row in run.rows(Table.FINDINGS)]
    found += _scheduler_order(history.values())
    found += _state_not_restored(events)
    found += _recomputed_otherwise(run)
    return tuple(sorted(found, key=lambda finding: (finding.step, finding.cause not in _ROOTS)))


#: Mistakes that bring others with them: told first.
_ROOTS = frozenset({Cause.MISUSE_AUTOCAST_SPANS_STEP})


def _seen(row: FindingRow) -> Finding:
    cause = Cause(row.cause) if row.cause in Cause._value2member_map_ else Cause.UNKNOWN
    return Finding(
        step=row.step,
        last_step=row.step,
        count=1,
        severity=Severity.ERROR,
        cause=cause,
        source=source_line(row),
        explanation=_EXPLAINED.get(cause, "") or f"evidence: {json.loads(row.evidence)}",
        remedies=remedies(cause),
    )


def _scheduler_order(histories: Iterable[History]) -> list[Finding]:
    """Per-step schedulers that moved the learning rate although the optimizer step before was skipped."""
    found = []
    for history in histories:
        moved = np.diff(history.lr) != 0
        moved &= ~np.isnan(np.diff(history.lr))
        skipped = history.skipped[:-1]
        after_good, ran_on = moved[~skipped], history.step[:-1][skipped & moved]
        per_step = not after_good.size or after_good.mean() >= PER_STEP_SCHEDULER
        if ran_on.size and (per_step or ran_on.size > 1):
            found.append(_ran_on(int(ran_on[0]), int(ran_on[-1]), int(ran_on.size)))
    return found


def _ran_on(first: int, last: int, count: int) -> Finding:
    times = "once" if count == 1 else f"{count} times"
    return Finding(
        step=first,
        last_step=last,
        count=count,
        severity=Severity.WARNING,
        cause=Cause.MISUSE_SCHEDULER_ORDER,
        source=None,
        explanation=(
            f"The learning rate moved on {times} although the optimizer step before had been skipped: the schedule "
            "advances without training."
        ),
        remedies=remedies(Cause.MISUSE_SCHEDULER_ORDER),
    )


def _state_not_restored(events: Sequence[ScalerEventRow]) -> list[Finding]:
    """A scaler that began at its initial scale in mid-run, although the run had found another one."""
    found = []
    for start in events:
        if start.action != ScalerAction.INIT or (start.segment == 0 and start.step == 0):
            continue
        own = [e for e in events if (e.segment, e.scaler) == (start.segment, start.scaler)]
        loaded = any(event.action == ScalerAction.STATE_LOADED for event in own)
        before = (e for e in events if e.time < start.time and e.scaler != start.scaler)
        last = next((e.scale_after for e in reversed(list(before)) if e.scale_after is not None), None)
        if not loaded and last is not None and start.scale_after not in (None, last):
            found.append(_started_afresh(start, last))
    return found


def _started_afresh(start: ScalerEventRow, last: float) -> Finding:
    line: SourceLine | None = source_line(start)
    return Finding(
        step=start.step,
        last_step=start.step,
        count=1,
        severity=Severity.WARNING,
        cause=Cause.MISUSE_SCALER_STATE_NOT_RESTORED,
        source=line,
        explanation=(
            f"A new scaler took over without the old one's state: it starts at {start.scale_after:g} where the run had "
            f"come to {last:g}, and loses steps to calibrate a second time."
        ),
        remedies=remedies(Cause.MISUSE_SCALER_STATE_NOT_RESTORED),
    )


def _recomputed_otherwise(run: Run) -> list[Finding]:
    """Checkpointed lines whose recomputation ran under another autocast state than their forward."""
    sites = run.rows(Table.SITES, rank=min(run.ranks, default=0))
    forward = {_line(site): site.autocast for site in sites if site.phase == Phase.FORWARD}
    again = [site for site in sites if site.phase == Phase.RECOMPUTE]
    other = next((site for site in again if forward.get(_line(site), site.autocast) != site.autocast), None)
    if other is None:
        return []
    cause = Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH
    return [
        Finding(
            step=0,
            last_step=0,
            count=1,
            severity=Severity.ERROR,
            cause=cause,
            source=source_line(other),
            explanation=_EXPLAINED[cause],
            remedies=remedies(cause),
        )
    ]


def _line(site: SiteRow) -> tuple[str, str, int, str]:
    return site.module, site.file, site.line, site.op
