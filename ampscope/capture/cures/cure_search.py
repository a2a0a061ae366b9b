"""The search asks what would have cured a bad step, and tries it: replays with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.changes import failure
from ampscope.capture.changes.failure import Failure
from ampscope.capture.changes.replaced_calls import OtherForm
from ampscope.capture.changes.replay_change import ModulesInFloat32, ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, FormUsed, ReplayResult, TrialResult
from ampscope.capture.cures.trial_costs import StepTimes
from ampscope.capture.cures.trial_plan import Plan, TrialFeedback, feedback_of, plan
from ampscope.capture.isolation import memory
from ampscope.capture.isolation.device_asserts import can_assert
from ampscope.capture.rerun.engine import LookDepth, Rerun, RerunEngine
from ampscope.capture.rerun.player import OF_UNCHANGED
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.capture.tracing.light_statistics import finite
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace import schema
from ampscope.trace.schema import Form, OpRow, ReplayStatus, Trial
from ampscope.trace.vocabulary import NOT_DETERMINISTIC

#: Later bad steps on which a cure is tried, at the most.
FOLLOWED = 3


class FailureSearch:
    """The plan for one failure, which goes on where it stopped, and the smallest cure that it has found.

    Args:
        plan: What is to be tried.
        modules: In which values went wrong first.
    """

    def __init__(self, plan: Plan, modules: tuple[str, ...]) -> None:
        self.plan = plan
        self._modules = modules
        self._pending = next(plan, None)
        self._cure: ReplayChange | None = None
        self._cured = 0  # later bad steps
        self._followed = 0  # of them and those that it did not cure
        self._following: ReplayChange | None = None  # the cure, on the present step
        self._further: ReplayChange | None = None  # it with the modules in which the step then failed

    @property
    def is_promising(self) -> bool:
        """Whether what comes next is another form of the failed call, or more modules where one moved the failure."""
        coming = self._following or self._further or self._pending
        widens = isinstance(coming, ModulesInFloat32) and len(coming.modules) > 1 and not coming.because
        return widens or isinstance(coming, OtherForm)

    def next(self, *, first: bool, spare: bool) -> ReplayChange | None:
        """Returns the change to try next; None where there is nothing more.

        Args:
            first: Nothing has been tried on the step yet: what has cured one before is, before the plan goes on.
            spare: More than one change may be tried.
        """
        if first:
            self._following = self._further = None
            if self._cure is not None and self._followed < FOLLOWED and (spare or self._pending is None):
                self._followed += 1
                self._following = _anew(self._cure)
        return self._following or self._further or self._pending

    def showed(self, change: ReplayChange, feedback: TrialFeedback) -> int:
        """Notes what came of a change; gives the number of later bad steps that it has cured by now."""
        cures = feedback.outcome is Trial.FINITE
        if change is self._following:
            self._following = None
            self._cured += cures
            if not cures:
                self._further, self._cure = self._with_modules(change, feedback), None
            return self._cured if cures else 0
        smaller = self._cure is None or _size(change) < _size(self._cure)
        if cures and smaller and not change.because and isinstance(change, (OtherForm, ModulesInFloat32)):
            self._cure, self._cured, self._followed = change, 0, 0
        if change is self._further:
            self._further = None
        else:
            self._pending = _sent(self.plan, feedback)
        return 0

    def _with_modules(self, cure: ReplayChange, feedback: TrialFeedback) -> ReplayChange | None:
        """Float32 also for the modules to which a cure has only moved the failure; None where there are none."""
        again = feedback.failure.modules if feedback.failure is not None else ()
        whole = cure if isinstance(cure, ModulesInFloat32) else ModulesInFloat32(self._modules)
        more = tuple(name for name in again if name not in whole.modules)
        return whole.with_modules(more) if more else None


def _anew(cure: ReplayChange) -> ReplayChange:
    """Makes the same change, which has seen nothing of another step."""
    if isinstance(cure, OtherForm):
        return cure.at_scale(cure.scale)
    return cure.with_modules(()) if isinstance(cure, ModulesInFloat32) else cure


def _size(change: ReplayChange) -> tuple[bool, int]:
    return not isinstance(change, OtherForm), len(change.modules)


def _sent(plan: Plan, feedback: TrialFeedback) -> ReplayChange | None:
    try:
        return plan.send(feedback)
    except StopIteration:
        return None


class RowsLeftOut(ReplayChange):
    """The step without some rows of its batch: of all that comes from outside and has as many rows as the batch.

    Args:
        of: How many rows the batch has.
        kept: The numbers of those that stay.
        whole: What has no rows, whatever its size, by ``id``: each parameter and buffer.
    """

    kind = schema.Change.FORM

    def __init__(self, of: int, kept: Tensor, whole: frozenset[int]) -> None:
        super().__init__()
        self._of = of
        self._kept = kept
        self._whole = whole

    @property
    def left_out(self) -> str:
        """How many rows do not stay, in words."""
        return f"{self._of - len(self._kept)} of {self._of}"

    @property
    def used(self) -> FormUsed:
        """See `OtherForm.used`: it is the form of no call."""
        return FormUsed(Form.ROWS_LEFT_OUT, "", NOWHERE)

    def given(self, original: Tensor, read: Tensor) -> Tensor:
        """See `ReplayChange.given`."""
        if not self._cuts(original):
            return read
        with self._unseen():
            kept = read.detach().index_select(0, self._kept.to(read.device))
        return kept.requires_grad_(read.requires_grad)

    def rivals(self, step: TapedStep) -> Iterator[RowsLeftOut]:
        """Yields changes that leave one more tensor whole, which may be a table with as many rows as the batch."""
        read = (each.tensor for _, entry in step.entries() for each in entry.arguments.outside)
        others = {id(tensor): tensor for tensor in read if self._cuts(tensor) and finite(tensor)}
        return (RowsLeftOut(self._of, self._kept, self._whole | {key}) for key in others)

    def _cuts(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._whole and tensor.dim() > 0 and len(tensor) == self._of


def bad_rows_left_out(step: TapedStep, models: Models) -> RowsLeftOut | None:
    """Makes the change that leaves out rows which are not finite.

    Returns:
        The change; None where there are no such rows, no others, or such rows in batches of several sizes.
    """
    weights = frozenset((*models.parameters, *(id(buffer) for _, _, buffer in models.buffers())))
    outside = (read for _, entry in step.entries() for read in entry.arguments.outside)
    bad: dict[int, Tensor] = {}
    for read in outside:
        tensor = read.tensor.detach()
        if (
            read.identity in weights
            or not tensor.dim()
            or not tensor.is_floating_point()
            or tensor.is_sparse
            or tensor.is_nested
        ):
            continue
        rows = (tensor.isnan() | tensor.isposinf()).flatten(1).any(1) if tensor.dim() > 1 else tensor.isnan()
        if rows.any():
            bad[len(rows)] = bad[len(rows)] | rows if len(rows) in bad else rows
    if len(bad) != 1:
        return None
    ((of, rows),) = bad.items()
    kept = torch.arange(of)[~rows.cpu()]
    return RowsLeftOut(of, kept, weights) if len(kept) else None


class TrialRun(NamedTuple):
    """One change that was tried, what came out, and the rows of what ran."""

    trial: TrialResult
    rows: TracedRows
    change: ReplayChange


class CureSearch:
    """Tries changes on bad steps, within the budget; a failure that comes again goes on where the last one stopped.

    Args:
        engine: Runs steps again; its budget says how often.
    """

    def __init__(self, engine: RerunEngine) -> None:
        self._engine = engine
        self._models = engine.models
        self._budget = engine.budget
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
            left_out = bad_rows_left_out(step, self._models) if located.op.op == schema.Node.INPUT else None
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
        times = StepTimes(step, self._engine)
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
        look = LookDepth.RECORDED if change.kind is schema.Change.FP32 else LookDepth.ROWS
        ran = self._engine.run(Rerun(step, change, look, is_brief=is_brief))
        output = failure.output_at(ran.rows, located) if located is not None else None
        return TrialRun(_trial(change, step, ran.result, output), ran.rows, change)


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
