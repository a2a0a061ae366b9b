"""The ways in which a step ends: through a scaler that reads `found_inf`, on the device, without a scaler, by closure.

With a scaler, its own optimizer hook tells whether it skipped, for it has waited for ``found_inf`` already; a fused
optimizer decides on the device, and `DeviceDecisions` learns of it later. Without one, AMPscope itself checks the
gradients before the optimizer writes, or the loop does by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events.calls import BareStep
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep, OpenStep, ScaleState, StepAttempt
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.carried.carried_state import CarriedState
from ampscope.capture.step.carried.loop_mode import LoopMode
from ampscope.capture.step.cycle import Moment, State, StepCycle
from ampscope.capture.step.ending import verdict
from ampscope.capture.step.ending.device_decisions import DeviceDecisions
from ampscope.capture.step.ending.incidents import Incidents
from ampscope.capture.step.ending.verdict import Verdict
from ampscope.capture.step.measures import gradients
from ampscope.capture.step.measures.state.written_state import WrittenState
from ampscope.capture.step.observers import Observers
from ampscope.capture.step.optimizer_numbers import OptimizerNumbers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import steps_running


class Endings:
    """Ends one step after another; many methods because each way to end has its own.

    Args:
        models: The watched models.
        optimizers: Which optimizers are the run's, and their steps.
        cycle: Where the step is.
        observers: Are told.
        incidents: Takes the steps that went bad.
        tape: What a replay needs.
        written: Whether buffers that a step wrote are finite.
        carried: What the loop carries from step to step, and whether it is finite.
        own: Marks AMPscope's own work.
        guard: Catches faults of judging and recording.
    """

    def __init__(
        self,
        models: Models,
        optimizers: OptimizerNumbers,
        cycle: StepCycle,
        observers: Observers,
        incidents: Incidents,
        tape: StepTape,
        written: WrittenState,
        carried: CarriedState,
        own: OwnWork,
        guard: Guard,
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._cycle = cycle
        self._observers = observers
        self._incidents = incidents
        self._tape = tape
        self._written = written
        self._carried = carried
        self._own = own
        self._guard = guard
        self.on_device = DeviceDecisions(models, self._judge)
        self.attempt: StepAttempt | None = None  #: between its begin and its end
        self._evaluating: Optimizer | None = None  # an optimizer that runs forward and backward by itself
        self.in_closure = False  #: of an optimizer
        self._steps_running = 0  # one inside the other, when the optimizer of the attempt began

    @property
    def between(self) -> LoopMode:
        """Listens to the loop between two steps."""
        return self._carried.mode

    # -- with a scaler ------------------------------------------------------------------------------------------

    def through_scaler(
        self, opened: OpenStep, optimizer: Optimizer, scaling: ScaleState, proceed: Callable[[], Any]
    ) -> tuple[Any, StepAttempt]:
        """Runs ``scaler.step(optimizer)``.

        Returns:
            What it returned, and the attempt; that it was skipped is known by then unless it ``on_device``.
        """
        with self._own:
            attempt = self.attempt = self._begin(opened, optimizer, scaling)
            with self._guard:
                self.on_device.decide(wait=True)
                self.on_device.look_ahead(attempt)
        try:
            result = proceed()
        except BaseException:
            self._tape.weights_moved()
            raise
        finally:
            self.attempt = None
            self._cycle.leave_optimizer()
        with self._own:
            with self._guard:
                if attempt.on_device:
                    self.on_device.postpone(attempt, self._recording())
                elif not attempt.stepped:
                    self._written.turned_bad()
                    self._found(attempt, verdict.of_skip(attempt, self._models))
            self._end(attempt)
        return result, attempt

    # -- the optimizer's own hooks, within AMPscope's own work --------------------------------------------------

    def before_optimizer(self, opened: OpenStep, optimizer: Optimizer, *, with_closure: bool) -> None:
        """An optimizer is about to step: with finite gradients, or without a scaler to judge them."""
        if self.attempt is None and (with_closure or not self._cycle.is_open):
            self._evaluating = optimizer  # forward and backward come while it steps, or there are none
            if not with_closure:
                self._observers.tell(StepObserver.bare_step, BareStep(optimizer, late=True))
            return
        if self.attempt is None:
            self.attempt = self._begin(opened, optimizer, None)
            self._without_scaler(self.attempt)
        if self.attempt.optimizer is optimizer:
            self._steps(self.attempt)

    def closure_began(self, optimizer: Optimizer) -> None:
        """The closure of an optimizer is about to run forward and backward, once more if it has been run before."""
        self.in_closure = True
        if self._evaluating is optimizer:
            self._cycle.leave_optimizer()
            if self.attempt is not None:
                self._tape.weights_moved()

    def closure_ended(self, opened: OpenStep, optimizer: Optimizer) -> None:
        """What is there now is what the optimizer will use."""
        self.in_closure = False
        if self._evaluating is not optimizer:
            return
        if not self._cycle.is_open:
            self._observers.tell(StepObserver.bare_step, BareStep(optimizer, late=True))
        elif self.attempt is None:
            self.attempt = self._begin(opened, optimizer, None)
            self._without_scaler(self.attempt)
            self._steps(self.attempt)
        else:
            self.gradients_complete()
            self._tape.stop()
            self._check(self.attempt)
            self._cycle.enter_optimizer()

    def closure_lost(self, optimizer: Optimizer) -> None:
        """The closure was left by an exception, and so was the optimizer."""
        self.in_closure = False
        if self._evaluating is optimizer:
            self._evaluating = self.attempt = None

    def optimizer_is_lost(self, *, another_begins: bool) -> bool:
        """Whether the optimizer that was stepping was left by an exception; the step is taken up again then.

        Args:
            another_begins: Whether the ``step`` of an optimizer is just being entered.
        """
        if self._cycle.state is not State.STEPPING or steps_running() - another_begins >= self._steps_running:
            return False
        self._cycle.leave_optimizer()
        self._evaluating = self.attempt = None
        self._tape.weights_moved()  # as far as it came
        return True

    def after_optimizer(self, opened: OpenStep, optimizer: Optimizer) -> None:
        """An optimizer has stepped; one whose class steps through its base has not, until that returns."""
        if self._cycle.state is State.STEPPING and steps_running() > self._steps_running:
            return
        if self._evaluating is optimizer:
            self._evaluating = None
            if self.attempt is None and self._cycle.is_open:  # it ran forward and backward, but not by a closure
                self.attempt = self._begin(opened, optimizer, None)
                self.attempt.stepped = True
                self._without_scaler(self.attempt)
        attempt = self.attempt
        if attempt is None or attempt.optimizer is not optimizer:
            return
        self._cycle.leave_optimizer()
        with self._guard:
            self._incidents.look_at_weights(attempt)
        if attempt.scaling is None:
            self.attempt = None
            self._end(attempt)

    def _steps(self, attempt: StepAttempt) -> None:
        """The optimizer of an attempt is about to write into its parameters."""
        attempt.stepped = True
        self._cycle.enter_optimizer()
        self._steps_running = steps_running()
        with self._guard:
            poisoned = self._written.turned_bad()
            self._found(attempt, verdict.of_what_gradients_hide(attempt, poisoned, self._carried.turned_bad()))
        self._observers.tell(StepObserver.optimizer_steps, attempt)

    def _without_scaler(self, attempt: StepAttempt) -> None:
        """``optimizer.step()`` without a scaler (or past it): the one check of the gradients is ours."""
        self._observers.tell(StepObserver.bare_step, BareStep(attempt.optimizer, self._tape.half_forward))
        self._check(attempt)

    def _check(self, attempt: StepAttempt) -> None:
        with self._guard:
            attempt.norm = gradients.total_norm(attempt.optimizer)
            self._found(attempt, verdict.of_unscaled_step(attempt, self._models))

    def gradients_complete(self) -> None:
        """Unscaling, clipping and stepping follow: nothing of these is ever replayed."""
        self._tape.complete()
        if self._cycle.on(Moment.HAS_GRADIENTS):
            self._observers.tell(StepObserver.gradients_complete)

    def before_weights_move(self, opened: OpenStep, weights: list[Tensor]) -> None:
        """The loop moves weights in mid-step (SAM): what the step has come to so far is judged before they do."""
        with self._guard:
            if self._optimizers.nobody_steps(weights):
                self._updated_by_hand(opened, weights)
            elif opened.bad is None:
                attempt = self._attempt_of(opened, weights)
                self._check(attempt)
                self._found(attempt, verdict.of_what_gradients_hide(attempt, [], None))
                opened.bad = attempt if attempt.bad else None

    def _updated_by_hand(self, opened: OpenStep, weights: list[Tensor]) -> None:
        """No optimizer steps these weights: their change is the step, and ends it."""
        attempt = self._ready(self._attempt_of(opened, weights))
        attempt.stepped = True
        self._without_scaler(attempt)
        poisoned = self._written.turned_bad()
        self._found(attempt, verdict.of_what_gradients_hide(attempt, poisoned, self._carried.turned_bad()))
        self._end(attempt)

    def left_unfinished(self, opened: OpenStep) -> None:
        """The loop ends, or gives up the step, before an optimizer steps: the loss may be why.

        Loops look at it themselves and stop, with backward called or not; autograd's anomaly mode does so in backward.
        """
        if opened.bad is not None or not self._cycle.is_open or self._tape.broken:
            return
        with self._guard:
            unused = self._tape.add_missing_backward(self._own.ambient)
            if unused is not None:
                opened.backward([unused])
            opened.wait_for_losses()
            if bad := verdict.of_loss_alone(opened):
                weights: list[Tensor] = [weight for _, weight in self._models.parameters.values()]
                opened.bad = self.attempt or self._attempt_of(opened, weights)
                self._found(opened.bad, bad)

    def _begin(self, opened: OpenStep, optimizer: Optimizer, scaling: ScaleState | None) -> StepAttempt:
        index, step = self._optimizers.index_of(optimizer), self._optimizers.step_of(optimizer)
        return self._ready(StepAttempt(optimizer, index, step, scaling, opened, norm=opened.norms.get(id(optimizer))))

    def _ready(self, attempt: StepAttempt) -> StepAttempt:
        """An attempt with all that is known of its step, now that its gradients are complete."""
        opened = attempt.opened
        self.gradients_complete()
        self._tape.stop()
        if not opened.losses:
            opened.given(self._tape.given_losses())
        if opened.bad is not None:
            attempt.bad, attempt.traced, attempt.judging_s = True, opened.bad.traced, opened.bad.judging_s
        self._observers.tell(StepObserver.attempt_began, attempt)
        return attempt

    def _attempt_of(self, opened: OpenStep, weights: list[Tensor]) -> StepAttempt:
        """The attempt that the optimizer of ``weights`` has not made yet."""
        given = {name: each.gradient for name, each in self._tape.given().items()}
        optimizer, index = self._optimizers.of_weights(weights, given)
        scaling = ScaleState.of(opened.scaler) if opened.scaler is not None else None
        return StepAttempt(optimizer, index, self._optimizers.step_at(index), scaling, opened)

    def _found(self, attempt: StepAttempt, bad: Verdict | None) -> None:
        if bad is not None and not attempt.bad:
            self._judge(attempt, bad, None if self._tape.broken else self._recording())

    def _recording(self) -> TapedStep:
        return self._carried.completed(self._tape.recording())

    def _judge(self, attempt: StepAttempt, bad: Verdict, recording: TapedStep | None) -> None:
        with self._cycle.inside(State.JUDGING):
            self._incidents.judge(attempt, bad, recording)
            self._carried.judged(attempt)

    def _end(self, attempt: StepAttempt) -> None:
        seconds = time.perf_counter() - attempt.opened.began
        if attempt.norm is None:
            attempt.norm = attempt.opened.norms.get(id(attempt.optimizer))
        ended = EndedStep(attempt, self._cycle.attempts, seconds, self._own.ambient)
        self._observers.tell(StepObserver.step_ended, ended)
        with self._guard:
            self._incidents.passed(ended)
        self._optimizers.stepped(attempt, first=self._cycle.is_open)
        self._cycle.on(Moment.ENDS)
