"""Plans what is tried on a failure, and in which order; the plan is told what each trial showed."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import NamedTuple

import torch

from ampscope.capture.replay.changes import (
    ConversionsInFloat32,
    EverythingIn,
    ModulesInFloat32,
    OtherLossScale,
    ReplayChange,
)
from ampscope.capture.replay.cures import failure
from ampscope.capture.replay.cures.failure import Failure
from ampscope.capture.replay.cures.forms.candidates import AS_CONVERTED, OF_MATHEMATICS, OF_RANGE, forms
from ampscope.capture.replay.cures.forms.form_change import OtherForm
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace.schema import LOSS_CODE, Trial

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
        candidates = list(forms(rows, OF_MATHEMATICS))
        del rows, wide  # a plan waits for the failure to come again
        if left_out is not None:
            yield left_out
        yield from _until_cured(candidates, scale)
        return
    rules = AS_CONVERTED if everything.conversions else OF_RANGE
    candidates = list(forms(rows, rules, located=located, wide=wide.rows))
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
    for other in forms(feedback.rows, OF_MATHEMATICS):
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
