"""Asks what would have cured a bad step, and tries it: replays with one thing changed at a time."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.replay import memory, player, step_replay
from ampscope.capture.replay.changes import ModulesInFloat32, ReplayChange
from ampscope.capture.replay.cures import failure
from ampscope.capture.replay.cures.costs import StepTimes
from ampscope.capture.replay.cures.failure import Failure
from ampscope.capture.replay.cures.failure_search import FailureSearch
from ampscope.capture.replay.cures.forms import rows_left_out
from ampscope.capture.replay.cures.forms.form_change import OtherForm
from ampscope.capture.replay.cures.forms.rows_left_out import RowsLeftOut
from ampscope.capture.replay.cures.plan import feedback_of, plan
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

#: Program points of trials that are not recorded which are remembered; a program may make its code as it runs.
MOST_SITES = 20_000


class TrialRun(NamedTuple):
    """One change that was tried, what came out, and the rows of what ran."""

    trial: TrialResult
    rows: TracedRows
    change: ReplayChange


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
        self._unrecorded = Sites(0, models.module_type)
        self._budget = budget
        self._guard = guard
        self._searches: dict[object, FailureSearch] = {}

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
        """Runs the step once more as it was: a step on which two replays agree is deterministic."""
        if not self._budget.allows_trial(0):
            return []
        run = self._try(ReplayChange(), None, step)
        if run.trial.result.outcome is Trial.FINITE and not rows.agrees(run.rows):
            run = run._replace(trial=run.trial._replace(result=run.trial.result._replace(reason=NOT_DETERMINISTIC)))
        return [run]

    def _follow(self, located: Failure, step: TapedStep, rows: TracedRows) -> list[TrialRun]:
        key = (located.op, located.by_scale)
        search = self._searches.get(key)
        if search is None:
            left_out = rows_left_out.of_step(step, self._models) if located.op.op == schema.Node.INPUT else None
            steps = plan(located, step.scale, rows, left_out=left_out)
            search = self._searches[key] = FailureSearch(steps, located.modules[:1])
        runs: list[TrialRun] = []
        tried = 0
        while self._budget.allows_trial(tried, promising=search.is_promising):
            change = search.next(first=not tried, spare=self._budget.allows_trial(tried + 1))
            if change is None:
                return self._timed(runs, step, tried)
            obstacle = self._obstacle(step, rows, change)
            if obstacle:
                result = ChangedResult(Trial.UNAVAILABLE, obstacle)
                return [*runs, TrialRun(_trial(change, step, result), rows, change)]
            run = self._try(change, located, step)
            tried += 1
            feedback = feedback_of(run.trial.result.outcome, run.rows, scaled=step.scale is not None)
            followed = search.showed(change, feedback)
            if not isinstance(change, OtherForm) or change.used is not None:
                runs.append(_told(run, rows, followed))  # else the call is not made there: nothing was changed
        return runs

    def _timed(self, runs: list[TrialRun], step: TapedStep, tried: int) -> list[TrialRun]:
        """The runs with what those that cured cost in time, where trials are left over for that."""
        times = StepTimes(step, self._models, self._guard, self._budget)
        timed: list[TrialRun] = []
        for run in runs:
            cures = run.trial.result.outcome is Trial.FINITE and run.change.kind is not schema.Change.SCALE
            if cures and self._budget.allows_trial(tried):
                tried += 1
                run = run._replace(trial=run.trial._replace(extra_time=times.extra_time(run.change)))  # noqa: PLW2901
            timed.append(run)
        return timed

    def _obstacle(self, step: TapedStep, rows: TracedRows, change: ReplayChange) -> str:
        """Why a change cannot be tried on a step; empty where it can."""
        if step.has_received():
            return OF_UNCHANGED
        needed = rows.bytes_written() + memory.of_weights(self._models, change.dtype)
        if not memory.fits(needed, self._models.main_device()):
            return memory.NO_ROOM
        return ""

    def _try(self, change: ReplayChange, located: Failure | None, step: TapedStep) -> TrialRun:
        """A replay with a change; with its backward where that is told, asked for, or where the failure is now."""
        is_brief = isinstance(change, (OtherForm, ModulesInFloat32)) and change.scale is None and not step.updates
        run = self._run(change, located, step, is_brief=is_brief)
        made = not isinstance(change, OtherForm) or change.used is not None
        lost = is_brief and made and run.trial.result.outcome is Trial.NONFINITE
        return self._run(change, located, step) if lost and failure.located(run.rows, scaled=False) is None else run

    def _run(
        self, change: ReplayChange, located: Failure | None, step: TapedStep, *, is_brief: bool = False
    ) -> TrialRun:
        recorded = change.kind is schema.Change.FP32
        if len(self._unrecorded) > MOST_SITES:
            self._unrecorded = Sites(0, self._models.module_type)
        sites = self._sites if recorded else self._unrecorded
        stops = (player.call_user.__code__,)
        tracer = Tracer(sites, self._models.names, full=False, guard=self._guard, stops=stops)
        tracer.outputs.sums = recorded
        result = step_replay.retry(step, self._models, tracer, change, is_brief=is_brief)
        self._budget.spent(result.seconds)
        rows = TracedRows(*tracer.rows(0, ""), sites)
        tracer.release()
        output = failure.output_at(rows, located) if located is not None else None
        return TrialRun(_trial(change, step, result, output), rows, change)


def _trial(change: ReplayChange, step: TapedStep, result: ChangedResult, output: OpRow | None = None) -> TrialResult:
    low, high = (output.min, output.max) if output is not None else (None, None)
    scale = change.scale or step.scale
    if change.because and result.outcome is not Trial.UNAVAILABLE:
        result = result._replace(reason=change.because)
    used = change.used if isinstance(change, (OtherForm, RowsLeftOut)) else None
    return TrialResult(change.kind, change.modules, change.conversions, scale, result, low, high, used)


def _told(run: TrialRun, unchanged: TracedRows, followed: int) -> TrialRun:
    """A run with what its change has cost in memory, where it cured, and on how many later steps it has."""
    if run.trial.result.outcome is not Trial.FINITE:
        return run
    more = run.rows.forward_bytes() - unchanged.forward_bytes()
    return run._replace(trial=run.trial._replace(extra_bytes=more, followed=followed))
