"""Records what an optimizer's step on copies shows: its ops, and what would have kept it finite."""

from __future__ import annotations

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.step.ending.optimizer_again.cures import cures
from ampscope.capture.step.ending.optimizer_again.rerun import StepAgain, rerun
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import Source, source_of


class OptimizerAgain:
    """Runs steps of optimizers that left something bad again.

    Args:
        models: The watched models.
        recorder: Where rows go.
        budget: Says whether changes are tried at all.
        guards: Catch faults of running it again, and of trying something.
    """

    def __init__(self, models: Models, recorder: Recorder, budget: ReplayBudget, guards: tuple[Guard, Guard]) -> None:
        self._models = models
        self._recorder = recorder
        self._budget = budget
        self._guard, self._trial_guard = guards

    def show(self, attempt: StepAttempt, names: list[str]) -> None:
        """Records which op of the optimizer makes what is bad, as far as its step shows it, and what cures that.

        Args:
            attempt: Its optimizer has stepped; its gradients are still there.
            names: Qualified names of the parameters that are bad, or whose state is.
        """
        replayed = source_of(Source.REPLAY, attempt.index)
        tracer = Tracer(self._recorder.sites, self._models.names, full=True, guard=self._guard)
        with self._guard:
            again = StepAgain.of(attempt, names, self._models) if attempt.traced != replayed else None
            if again is not None and rerun(again, self._models, tracer):
                attempt.traced = replayed
                self._recorder.trace(*tracer.rows(attempt.step, replayed), attempt.step, replayed)
                self.try_cures(attempt, names)
        attempt.before = None
        tracer.release()

    def try_cures(self, attempt: StepAttempt, names: list[str]) -> None:
        """Records what would have kept the step finite; arguments as in `show`."""
        if self._trial_guard.broken or not self._budget.allows_trial(0):
            return
        with self._trial_guard:
            again = StepAgain.of(attempt, names, self._models)
            for trial in cures(again, self._models) if again is not None else ():
                self._budget.spent(trial.result.seconds)
                self._recorder.trial(trial, step=attempt.step, optimizer=attempt.index)
