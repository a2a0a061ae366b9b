"""Follows what a loop carries from step to step: who wrote it last, and the first step at which it was not finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ampscope.capture.events.calls import StepStart
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep, StepAttempt
from ampscope.capture.events.run_end import RunEnd
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.replay.results import ReplayResult
from ampscope.capture.replay.step_replay import WEIGHTS_HAD_MOVED
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.carried.between_steps import BetweenSteps
from ampscope.capture.step.carried.carried_tensors import Averages, Carried, buffer_name
from ampscope.capture.step.carried.condition import Condition
from ampscope.capture.step.carried.following import Following
from ampscope.capture.step.carried.moved_weights import IncidentReport, MovedWeights
from ampscope.capture.step.carried.within_step import WithinStep
from ampscope.capture.step.carried.written_between import WrittenBetween
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.calls.pause import Pause
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.distinct.casts_before import CastsBefore
from ampscope.capture.tracing.statistics import stats
from ampscope.trace.schema import ReplayStatus, Trigger


class CarriedState(StepObserver):
    """The tensors that a loop carries, between its steps and within them.

    A loop that carries nothing is listened to between its first steps only.

    Args:
        models: The watched models.
        tape: The tape of the step in progress.
        recorder: Where rows go.
        report: Is told of weights that the loop has left bad.
        casts: Is told of casts between the first steps.
        pause: On while AMPscope's own code computes.
        guard: Catches faults of following them.

    Attributes:
        mode: Listens between steps.
        averages: What the loop keeps of the models.
    """

    def __init__(
        self,
        models: Models,
        tape: StepTape,
        recorder: Recorder,
        report: IncidentReport,
        casts: CastsBefore,
        pause: Pause,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._models = models
        self._carried = Carried(partial(buffer_name, models))
        self.averages = Averages(models)
        self._condition = Condition()
        self._written = WrittenBetween(models, self._condition, recorder, guard)
        self._following = Following(models)
        self._moved = MovedWeights(models, tape, recorder, report, guard)
        learns = self._carried, self.averages, self._condition
        self._between = BetweenSteps(*learns, self._written, self._moved, casts, pause, guard)
        self._within = WithinStep(tape, self._carried, self._condition, self._written)
        self.mode = self._between.mode

    @property
    def _follows(self) -> bool:
        return self._following.is_on(carries=bool(self._carried), suspects=bool(self._condition))

    def step_ended(self, ended: EndedStep) -> None:
        """Begins to listen between two steps, where the loop is followed; the next forward ends it."""
        self._following.step_ended(ended.number + 1, bad=ended.attempt.bad)
        self._between.forget()
        self._written.after(ended.attempt)
        may_listen = (self._follows or ended.attempt.by_hand) and self._following.may_listen()
        moves = may_listen and self._moved.begin(ended.attempt)
        heard = self._following.hears(self._between.calls, suspects=bool(self._condition))
        if may_listen and (moves or (self._follows and heard)):
            self._between.begin(learning=self._following.learning, moves=moves)

    def step_began(self, start: StepStart) -> None:
        """Looks at what was written between the steps."""
        self._within.begin()
        self._between.end()

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Notes which carried tensors the step has read, and looks at those that it has made or written."""
        if not self._follows:
            self._within.look_at_attributes(attempt.step)
            return
        scale, _ = torch_private.scaler_tensors(attempt.opened.scaler)
        self._within.note_reads(but=scale)
        self._following.idle = 0 if self._within.names or self._is_of_use() else self._following.idle + 1
        self._within.look_at_writes(attempt.step)

    def _is_of_use(self) -> bool:
        """Whether the step may read what was made, between the steps, of what the loop carries; asked now and then."""
        if self._following.idle % 8 != 7:
            return False
        made = self._between.made_of_carried()
        return bool(made) and not made.isdisjoint(self._within.outside() | self._models.parameters.keys())

    def suffered(self) -> None:
        """The step in progress has gone wrong: looks at what it read of the calls before it; waits for the device."""
        self._moved.arrived(wait=True)
        self._within.arrived(wait=True)
        self._between.blame(self._within.outside())
        self._within.note_descent()

    def turned_bad(self) -> Trigger | None:
        """Returns why the carried state that the step has left, or found, is to be looked at, if it is; told once."""
        if self._within.has_left_bad():
            return Trigger.NONFINITE_CARRIED
        return Trigger.CARRIED_READ if self._within.take_read() else None

    def to_be_told(self, attempt: StepAttempt) -> Callable[[], None]:
        """The weights move before the host knows what the step has left: takes that down when it is called; waits."""
        left = self._within.to_be_told()

        def told() -> None:
            self._written.hold(attempt, left(), ReplayResult(ReplayStatus.UNAVAILABLE, WEIGHTS_HAD_MOVED))

        return told

    def completed(self, recording: TapedStep) -> TapedStep:
        """Adds to a recording of a step, from which it can be run again, what is known of the carried tensors in it."""
        within = self._within
        return recording._replace(carried=within.names, left=within.left, left_in_attributes=within.left_in_attributes)

    def judged(self, attempt: StepAttempt) -> None:
        """A step was looked at; if it went wrong, who wrote what it had read is told, too."""
        if attempt.bad:
            self._written.failed(self._within.labels)
        else:
            labels = {*dict(self._within.left), *self._within.left_in_attributes.values()}
            self._written.hold(attempt, labels, ReplayResult(ReplayStatus.EXACT))  # its replay is traced
        self._within.left, self._within.left_in_attributes = (), {}

    def abandoned(self, reason: str) -> None:
        """Stops listening."""
        self._between.stop()
        self._moved.forget()

    def run_ended(self, end: RunEnd) -> None:
        """Tells of writes that left an average of the model bad for good, though no step has read it; waits."""
        self._between.end(run_ended=True)
        bad = [held.tensor for held in self.averages.held() if not stats.finite(held.tensor)]
        self._written.remained({self._condition.descent.label(tensor) for tensor in bad} - {""})
