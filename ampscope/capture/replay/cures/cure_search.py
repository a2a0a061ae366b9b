"""Asks what would have cured a bad step, and tries it: replays with one thing changed at a time."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import torch

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.replay import memory, player, step_replay
from ampscope.capture.replay.changes import (
    ConversionsInFloat32,
    EverythingIn,
    ModulesInFloat32,
    OtherLossScale,
    ReplayChange,
)
from ampscope.capture.replay.cures import failure
from ampscope.capture.replay.cures.failure import Failure
from ampscope.capture.replay.cures.forms.candidates import OF_MATHEMATICS, forms
from ampscope.capture.replay.cures.forms.form_change import OtherForm
from ampscope.capture.replay.handing_back import OF_UNCHANGED
from ampscope.capture.replay.results import ChangedResult, ReplayResult, TrialResult
from ampscope.capture.replay.state.device_asserts import can_assert
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace import schema
from ampscope.trace.schema import OpRow, ReplayStatus, Trial
from ampscope.trace.vocabulary import NOT_DETERMINISTIC

#: Modules that are added one after another to those in float32, before the search is given up.
MOST_MODULES = 8


class TrialRun(NamedTuple):
    """One change that was tried: what came out, and the rows of what ran."""

    trial: TrialResult
    rows: TracedRows


class TrialFeedback(NamedTuple):
    """What a plan learns from a trial."""

    outcome: Trial
    failure: Failure | None = None  #: where values went wrong this time
    headroom: float | None = None  #: for a larger loss scale


#: A plan yields what to try next and is sent what that showed.
Plan = Generator[ReplayChange, TrialFeedback, None]


def plan(located: Failure, scale: float | None, rows: TracedRows) -> Plan:
    """What to try on a failure, the most telling first.

    All in float32 comes first: where that fails too, precision has no part in it, and other forms of the failed call
    are tried. Where it also replaced what the code itself converts to a half dtype, that is tried without any change of
    autocast.

    Args:
        located: Where the faithful replay placed it.
        scale: The loss scale of the step.
        rows: The records of the faithful replay.
    """
    everything = EverythingIn(torch.float32)
    if not located.dtypes or (yield everything).outcome is Trial.NONFINITE:
        yield from forms(rows, OF_MATHEMATICS)
        return
    if located.by_scale and scale is not None and scale > 1:
        yield from _largest_scale(scale)
    if everything.conversions:
        feedback = yield ConversionsInFloat32()
        if feedback.outcome is Trial.FINITE:
            return
        moved = feedback.failure if feedback.failure is not None and feedback.failure.op != located.op else None
        yield from _fewest_modules((moved or located).modules[:1], conversions=moved is not None)
    else:
        yield from _fewest_modules(located.modules[:1])
    if "float16" in located.dtypes:
        yield EverythingIn(torch.bfloat16)


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
        if feedback.outcome is not Trial.NONFINITE or not more:
            return
        chosen += more


class CureSearch:
    """Tries changes on bad steps, within the budget; a failure that comes again goes on where the last one stopped.

    Args:
        models: The watched models.
        sites: Numbers the program points of what may be recorded.
        budget: How many replays there may be.
        guard: Catches faults of the tracer.
    """

    def __init__(self, models: Models, sites: Sites, budget: ReplayBudget, guard: Guard) -> None:
        self._models = models
        self._sites = sites
        self._budget = budget
        self._guard = guard
        self._plans: dict[object, tuple[Plan, ReplayChange | None]] = {}

    def examine(self, step: TapedStep, rows: TracedRows, replay: ReplayResult) -> list[TrialRun]:
        """Tries what may cure a step whose faithful replay is done.

        Args:
            step: The step.
            rows: The records of its faithful replay.
            replay: What that came to.

        Returns:
            What was tried, in order.
        """
        if replay.status is ReplayStatus.RECEIVED:
            return []  # nothing that this rank does otherwise changes what the others sent
        if replay.status is ReplayStatus.DIVERGED and not replay.within_rounding and can_assert(self._models.devices):
            return []  # another step than the one that ran; on an accelerator nothing more is risked on it
        if replay.status is ReplayStatus.NOT_REPRODUCED:
            return self._again(step, rows)
        located = failure.located(rows, scaled=step.scale is not None)
        return self._follow(located, step, rows) if located is not None else []

    def _again(self, step: TapedStep, rows: TracedRows) -> list[TrialRun]:
        """The same once more: a step on which two replays agree is deterministic."""
        if not self._budget.allows_trial(0):
            return []
        run = self._try(ReplayChange(), None, step)
        if run.trial.result.outcome is Trial.FINITE and not rows.agrees(run.rows):
            run = run._replace(trial=run.trial._replace(result=run.trial.result._replace(reason=NOT_DETERMINISTIC)))
        return [run]

    def _follow(self, located: Failure, step: TapedStep, rows: TracedRows) -> list[TrialRun]:
        key = (located.op, located.by_scale)
        steps, change = self._plans.pop(key) if key in self._plans else _begun(plan(located, step.scale, rows))
        runs: list[TrialRun] = []
        while change is not None and self._budget.allows_trial(len(runs)):
            obstacle = self._obstacle(step, rows, change)
            if obstacle:
                result = ChangedResult(Trial.UNAVAILABLE, obstacle)
                runs.append(TrialRun(_trial(change, step, result), rows))
                break
            runs.append(self._try(change, located, step))
            change = _next(steps, _feedback(runs[-1]))
        self._plans[key] = steps, change
        return runs

    def _obstacle(self, step: TapedStep, rows: TracedRows, change: ReplayChange) -> str:
        """Why a change cannot be tried on a step; empty where it can."""
        if step.has_received():
            return OF_UNCHANGED
        needed = rows.bytes_written() + memory.of_weights(self._models, change.dtype)
        if not memory.fits(needed, self._models.main_device()):
            return memory.NO_ROOM
        return ""

    def _try(self, change: ReplayChange, located: Failure | None, step: TapedStep) -> TrialRun:
        recorded = change.kind is schema.Change.FP32
        sites = self._sites if recorded else Sites(0, self._models.module_type)
        stops = (player.call_user.__code__,)
        tracer = Tracer(sites, self._models.names, full=False, guard=self._guard, stops=stops)
        result = step_replay.retry(step, self._models, tracer, change)
        self._budget.spent(result.seconds)
        rows = TracedRows(*tracer.rows(0, ""), sites)
        tracer.release()
        output = failure.output_at(rows, located) if located is not None else None
        return TrialRun(_trial(change, step, result, output), rows)


def _trial(change: ReplayChange, step: TapedStep, result: ChangedResult, output: OpRow | None = None) -> TrialResult:
    low, high = (output.min, output.max) if output is not None else (None, None)
    scale = change.scale or step.scale
    used = change.used if isinstance(change, OtherForm) else None
    return TrialResult(change.kind, change.modules, change.conversions, scale, result, low, high, used)


def _begun(steps: Plan) -> tuple[Plan, ReplayChange | None]:
    return steps, next(steps, None)


def _next(steps: Plan, feedback: TrialFeedback) -> ReplayChange | None:
    try:
        return steps.send(feedback)
    except StopIteration:
        return None


def _feedback(run: TrialRun) -> TrialFeedback:
    outcome = run.trial.result.outcome
    again = failure.located(run.rows, scaled=False) if outcome is Trial.NONFINITE else None
    headroom = failure.scale_headroom(run.rows) if outcome is Trial.FINITE else None
    return TrialFeedback(outcome, again, headroom)
