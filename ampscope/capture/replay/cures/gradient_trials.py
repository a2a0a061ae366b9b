"""Tries what gives a step back the gradients that it lost: the same replays as for a failure, judged by their mass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.replay.changes import (
    ConversionsInFloat32,
    EverythingIn,
    ModulesInFloat32,
    OtherLossScale,
    ReplayChange,
)
from ampscope.capture.replay.cures import failure
from ampscope.capture.replay.results import ChangedResult, Regained, TrialResult
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.provenance import HowLost, Loss
from ampscope.trace.schema import LOSS_CODE, Phase, Trial

#: Runs the step with a change.
Run = Callable[[ReplayChange], Regained]
#: Says whether gradients are whole.
IsWhole = Callable[[Regained], bool]
#: A larger loss scale leaves this many doublings to the largest gradient.
_HEADROOM = 2
#: Where `GradScaler` starts by default.
ORDINARY_SCALE = 2.0**16


def gradient_trials(
    loss: Loss | None,
    rows: TracedRows,
    everything: TrialResult,
    run: Run,
    is_whole: IsWhole,
    *,
    scale: float | None,
    budget: ReplayBudget,
) -> Iterator[TrialResult]:
    """Tries one change after another, within the budget.

    Args:
        loss: Where the step lost its gradients.
        rows: The records of its faithful replay.
        everything: What everything in float32 came to.
        run: Runs the step with a change.
        is_whole: Whether the gradients that came out are whole.
        scale: The loss scale of the step; None without one.
        budget: How many replays there may be.
    """
    yield everything
    for number, change in enumerate(_changes(loss, rows, everything, scale), 1):
        if not budget.allows_trial(number):
            return
        found = run(change)
        budget.spent(found.seconds)
        outcome = Trial.UNAVAILABLE if found.reason else Trial.FINITE if is_whole(found) else Trial.NONFINITE
        yield trial(change, scale, ChangedResult(outcome, found.reason, found.loss, found.seconds))


def trial(change: ReplayChange, scale: float | None, result: ChangedResult) -> TrialResult:
    """A change that was tried, with what came out."""
    return TrialResult(change.kind, change.modules, change.conversions, change.scale or scale, result)


def _changes(
    loss: Loss | None, rows: TracedRows, everything: TrialResult, scale: float | None
) -> Iterator[ReplayChange]:
    if loss is None:
        return
    site = rows.graph().site(loss.origin.seq)
    if loss.how is HowLost.FLUSHED and scale is not None and site.phase == Phase.BACKWARD:
        larger = _larger_scale(rows, scale)
        if larger > scale:
            yield OtherLossScale(larger)
    if everything.conversions:
        yield ConversionsInFloat32()
    yield ModulesInFloat32((site.module or (LOSS_CODE if site.phase == Phase.LOSS else ""),))
    if loss.how is HowLost.FLUSHED:
        yield EverythingIn(torch.bfloat16)


def _larger_scale(rows: TracedRows, scale: float) -> float:
    """`GradScaler`'s own start, or a power of two under which float16 gradients stay well within their range."""
    headroom = failure.scale_headroom(rows)
    largest = 2.0 ** (math.floor(math.log2(scale * headroom)) - _HEADROOM) if headroom else ORDINARY_SCALE
    return min(largest, ORDINARY_SCALE) if scale < ORDINARY_SCALE else largest
