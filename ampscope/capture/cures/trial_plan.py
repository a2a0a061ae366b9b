"""A plan says what is tried on a failure, or on lost gradients, in which order; it is told what trials show."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import NamedTuple

import torch

from ampscope.capture.changes import failure
from ampscope.capture.changes.failure import Failure
from ampscope.capture.changes.replaced_calls import OtherForm
from ampscope.capture.changes.replay_change import (
    ConversionsInFloat32,
    EverythingIn,
    ModulesInFloat32,
    OtherLossScale,
    ReplayChange,
)
from ampscope.capture.changes.replay_results import ChangedResult, TrialResult
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.cures.catalogue import call_forms
from ampscope.cures.failed_op import failed_op
from ampscope.provenance import HowLost, LostMass
from ampscope.trace.schema import LOSS_CODE, Phase, Trial


def candidate_forms(
    rows: TracedRows, *, located: Failure | None = None, wide: TracedRows | None = None, converted: bool = False
) -> Iterator[OtherForm]:
    """The changes to try on a step that failed.

    Args:
        rows: The records of its faithful replay.
        located: Where it failed, of a step that is well in float32; None of one that is not.
        wide: The records of the step with everything in float32.
        converted: The code itself converts to half precision.
    """
    failed = failed_op(rows.graph())
    if failed is None or not failed.site.file:
        return
    failed.is_of_range, failed.is_converted = located is not None, converted
    if located is not None and wide is not None:
        failed.wide, failed.wide_graph = failure.output_at(wide, located), wide.graph()
    for form in call_forms(failed):
        yield OtherForm(form, form.at or failed.place)


#: Modules that are added one after another to those in float32, before the search is given up.
MOST_MODULES = 8
#: Forms of a second call that are tried with one of the first.
MOST_TOGETHER = 2


class TrialFeedback(NamedTuple):
    """The findings of a trial, from which a plan learns."""

    outcome: Trial
    failure: Failure | None = None  #: where values went wrong this time
    headroom: float | None = None  #: for a larger loss scale
    rows: TracedRows | None = None  #: of what ran


#: A plan yields what to try next and is sent what that showed.
Plan = Generator[ReplayChange, TrialFeedback, None]
#: A part of one, which says whether it has found a cure.
Part = Generator[ReplayChange, TrialFeedback, bool]


def plan(located: Failure, scale: float | None, rows: TracedRows, *, left_out: ReplayChange | None = None) -> Plan:
    """Yields what to try on a failure, the most telling first.

    All in float32 comes first: where that fails too, precision has no part in it, and other forms of the failed call
    are tried. Where it helps, less is tried: the failed call in another form, then a module, then more of them; what
    the code itself converts to a half dtype without any change of autocast, where float32 replaced such conversions.

    Args:
        located: Where the faithful replay placed it.
        scale: The loss scale of the step.
        rows: The records of the faithful replay.
        left_out: What leaves out the rows of the batch that came in not finite.
    """
    everything = EverythingIn(torch.float32)
    wide = (yield everything) if located.dtypes else None
    if wide is None or wide.outcome is Trial.NONFINITE:
        candidates = list(candidate_forms(rows))
        del rows, wide  # a plan waits for the failure to come again
        if left_out is not None:
            yield left_out
        yield from _until_cured(candidates, scale)
        return
    converted = bool(everything.conversions)
    candidates = list(candidate_forms(rows, located=located, wide=wide.rows, converted=converted))
    del rows, wide
    first = (yield candidates[0]) if candidates else None
    cured = first is not None and first.outcome is Trial.FINITE
    if not cured and located.by_scale and scale is not None and scale > 1:
        yield from _largest_scale(scale)
    if everything.conversions:
        feedback = yield ConversionsInFloat32()
        if feedback.outcome is Trial.FINITE:
            return
        moved = feedback.failure if feedback.failure is not None and feedback.failure.op != located.op else None
        yield from _fewest_modules((moved or located).modules[:1], conversions=moved is not None)
    else:
        yield from _fewest_modules(located.modules[:1])
    if not cured:
        yield from _remaining(candidates, first, scale)
    if "float16" in located.dtypes:
        yield EverythingIn(torch.bfloat16)


def _remaining(candidates: list[OtherForm], first: TrialFeedback | None, scale: float | None) -> Plan:
    """The forms that were not tried at once, and the first with a loss scale that fits it, until one cures."""
    if first is not None and (yield from _at_fitting_scale(candidates[0], first, scale)):
        return
    yield from _until_cured(candidates[1:], scale)


def _until_cured(candidates: list[OtherForm], scale: float | None) -> Plan:
    """Forms one after the other, until one cures the step and leaves good values what they are.

    Where a call is not made as it was thought to be, no other form of the same is tried.
    """
    missed: set[object] = set()
    for change in candidates:
        if change.called in missed:
            continue
        feedback = yield change
        moved_to = list(_behind(change, feedback))
        cured = feedback.outcome is Trial.FINITE or (yield from _at_fitting_scale(change, feedback, scale))
        del feedback  # with the records of what ran
        if not cured and moved_to:
            cured = yield from _together(change, moved_to)
        if change.used is None:
            missed.add(change.called)
        if cured and not change.changes_good_values:
            return


def _behind(change: OtherForm, feedback: TrialFeedback) -> Iterator[OtherForm]:
    """Forms of the call to which a form has moved the failure; none where its own call fails still."""
    if change.used is None or feedback.rows is None or feedback.failure is None or feedback.failure.by_scale:
        return
    for other in candidate_forms(feedback.rows):
        if other.called == change.called:
            return
        yield other


def _together(change: OtherForm, others: list[OtherForm]) -> Part:
    """A form with one of the call behind it, until one cures."""
    for other in others[:MOST_TOGETHER]:
        feedback = yield change.together(other)
        if feedback.outcome is Trial.FINITE:
            return True
    return False


def _at_fitting_scale(change: OtherForm, feedback: TrialFeedback, scale: float | None) -> Part:
    if feedback.failure is None or not feedback.failure.by_scale or scale is None or scale <= 1:
        return False
    if (milder := change.milder) is not None and (yield milder).outcome is Trial.FINITE:
        return True
    lowest = yield change.at_scale(1.0)
    if lowest.outcome is not Trial.FINITE:
        return False
    if lowest.headroom is not None and 1 < (best := 2.0 ** math.floor(math.log2(lowest.headroom))) < scale:
        yield change.at_scale(best)
    return True


def _largest_scale(scale: float) -> Plan:
    """A scale of 1, and from what it shows the largest power of two under which the gradients stay in range."""
    lowest = yield OtherLossScale(1.0)
    if lowest.outcome is not Trial.FINITE or lowest.headroom is None:
        return
    best = 2.0 ** math.floor(math.log2(lowest.headroom))
    if 1 < best < scale:
        yield OtherLossScale(best)


def _fewest_modules(first: tuple[str, ...], *, conversions: bool = False) -> Plan:
    """The first module alone; then also those in which values go wrong once it is cured.

    In every one of them a value is born non-finite of finite operands while the others are cured, so none can be left
    out.
    """
    chosen = first
    while len(chosen) <= MOST_MODULES:
        feedback = yield ModulesInFloat32(chosen, conversions=conversions)
        failing = feedback.failure.modules if feedback.failure is not None else ()
        more = tuple(name for name in failing if name not in chosen)
        if feedback.outcome is Trial.FINITE and feedback.rows is not None:
            yield from _wider(chosen, feedback.rows, conversions=conversions)
        if feedback.outcome is not Trial.NONFINITE or not more:
            return
        chosen += more


def _wider(cured: tuple[str, ...], rows: TracedRows, *, conversions: bool) -> Plan:
    """Tries float32 also in the modules in which the cured step is next to overflow: a little more, and it fails."""
    near = {name: factor for name, factor in failure.near_overflow(rows).items() if name not in cured}
    nearest = sorted(near, key=lambda name: near[name])[:MOST_MODULES]
    if nearest:
        first = "the loss code" if nearest[0] == LOSS_CODE else nearest[0]
        because = f"{first} is within a factor of {near[nearest[0]]:.2g} of overflow in the same step"
        yield ModulesInFloat32((*cured, *nearest), conversions=conversions, because=because)


def feedback_of(outcome: Trial, rows: TracedRows, *, scaled: bool) -> TrialFeedback:
    """Makes the feedback of a trial for its plan.

    Args:
        outcome: What came out.
        rows: The records of what ran.
        scaled: Whether the step has a loss scale.
    """
    again = failure.located(rows, scaled=scaled) if outcome is Trial.NONFINITE else None
    headroom = failure.scale_headroom(rows) if outcome is Trial.FINITE else None
    return TrialFeedback(outcome, again, headroom, rows)


#: A larger loss scale leaves this many doublings to the largest gradient.
_HEADROOM = 2
#: Where `GradScaler` starts by default.
ORDINARY_SCALE = 2.0**16


def gradient_trial(change: ReplayChange, scale: float | None, result: ChangedResult) -> TrialResult:
    """A change that was tried, with what came out."""
    return TrialResult(change.kind, change.modules, change.conversions, change.scale or scale, result)


def gradient_changes(
    loss: LostMass | None, rows: TracedRows, scale: float | None, *, conversions: bool
) -> Iterator[ReplayChange]:
    """Yields what to try on a step that lost gradients, besides everything in float32.

    Args:
        loss: Where the step lost them.
        rows: The records of its faithful replay.
        scale: The loss scale of the step; None without one.
        conversions: Everything in float32 has changed conversions that the code itself asks for.
    """
    if loss is None:
        return
    site = rows.graph().site(loss.origin.seq)
    if loss.how is HowLost.FLUSHED and scale is not None and site.phase == Phase.BACKWARD:
        larger = _larger_scale(rows, scale)
        if larger > scale:
            yield OtherLossScale(larger)
    if conversions:
        yield ConversionsInFloat32()
    yield ModulesInFloat32((site.module or (LOSS_CODE if site.phase == Phase.LOSS else ""),))
    if loss.how is HowLost.FLUSHED:
        yield EverythingIn(torch.bfloat16)


def _larger_scale(rows: TracedRows, scale: float) -> float:
    """`GradScaler`'s own start, or a power of two under which float16 gradients stay well within their range."""
    headroom = failure.scale_headroom(rows)
    largest = 2.0 ** (math.floor(math.log2(scale * headroom)) - _HEADROOM) if headroom else ORDINARY_SCALE
    return min(largest, ORDINARY_SCALE) if scale < ORDINARY_SCALE else largest
