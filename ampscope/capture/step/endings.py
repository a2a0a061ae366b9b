"""The ways in which a step ends: through a scaler that reads `found_inf`, on the device, without a scaler, by closure.

With a scaler, its own optimizer hook tells whether it skipped, for it has waited for ``found_inf`` already; where what
it was told to step has no hooks, ``found_inf`` tells. A fused optimizer decides on the device, and `DeviceDecisions`
learns of it later. Without one, AMPscope itself checks the gradients before the optimizer writes, or the loop does by
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim.optimizer import Optimizer

from ampscope.capture.events import BareStep, ScalerCall, StepAttempt, StepObserver
from ampscope.capture.hooks import process_hooks
from ampscope.capture.isolation.memory import collector
from ampscope.capture.loop_state.loop_mode import LoopMode
from ampscope.capture.step.attempts import Attempts
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.observers import Observers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.torch_support.guard import Guard, surely
from ampscope.capture.torch_support.optimizer_view import OptimizerView, steps_running
from ampscope.capture.torch_support.threads import HomeThread
from ampscope.capture.tracing.running_code import ModuleStack


class Endings:
    """Ends one step after another; many methods because each way to end has its own.

    Args:
        attempts: Begins, judges and ends the attempts.
        cycle: Where the step is.
        observers: Are told.
        incidents: Looks at what an optimizer has left.
        tape: What a replay needs.
        own: Marks AMPscope's own work.
        guard: Catches faults of judging and recording.
    """

    def __init__(
        self,
        attempts: Attempts,
        cycle: StepCycle,
        observers: Observers,
        incidents: Incidents,
        tape: StepTape,
        own: OwnWork,
        guard: Guard,
    ) -> None:
        self.attempts = attempts
        self._cycle = cycle
        self._observers = observers
        self._incidents = incidents
        self._tape = tape
        self._own = own
        self._guard = guard
        self._evaluating: Optimizer | None = None  # an optimizer that runs forward and backward by itself
        self._in_closure = False  #: of an optimizer
        self._stepping: Optimizer | None = None  # whose hook has told of the step of the attempt
        self._awaited: StepAttempt | None = None  # let through by its scaler, and of its step no hook has told so far
        self._steps_running = 0  # one inside the other, when the optimizer of the attempt began

    # -- with a scaler ------------------------------------------------------------------------------------------

    def through_scaler(self, call: ScalerCall, proceed: Callable[[], Any]) -> tuple[Any, StepAttempt]:
        """Runs ``scaler.step(optimizer)``.

        Returns:
            What it returned, and the attempt; that it was skipped is known by then unless it ``on_device``.
        """
        with self._own:
            attempt = self.attempts.current = self.attempts.begin(call.argument, call.scaling, call.place)
            with self._guard:
                self.attempts.on_device.decide(wait=True)
                self.attempts.on_device.look_ahead(attempt)
        try:
            result = proceed()
        except BaseException:
            self._tape.weights_moved()
            raise
        finally:
            self.attempts.current = None
            self._cycle.leave(State.STEPPING)
        with self._own:
            unheard, healed = not (attempt.stepped or attempt.on_device), False
            if attempt.on_device or unheard:
                with self._guard:
                    if attempt.on_device:
                        self.attempts.postpone(attempt)
                    elif self.attempts.was_skipped(attempt):
                        self.attempts.skipped(attempt)
                        unheard, healed = False, self.attempts.healed(attempt)
            if not healed:
                self._ends(attempt, unheard=unheard)
        if healed:
            result = self._step_after_all(attempt, call)
            with self._own:
                self._ends(attempt, unheard=not attempt.stepped)
        return result, attempt

    def _ends(self, attempt: StepAttempt, *, unheard: bool) -> None:
        """A scaler is done with an attempt; ``unheard``: its optimizer may step yet, or has, and no hook has told."""
        if unheard:
            attempt.stepped = attempt.late = True
            self.attempts.current = self._awaited = attempt
        else:
            self.attempts.end(attempt)

    def settle(self) -> None:
        """Ends an attempt that its scaler let through, where no hook has told of its step by now."""
        attempt, self._awaited = self._awaited, None
        if attempt is None:
            return
        with self._own:
            self.attempts.current = None
            self._cycle.leave(State.STEPPING)
            if attempt.late:
                self.attempts.check_the_rest(attempt)
                with self._guard:
                    self._incidents.cannot_follow(attempt)
            self.attempts.end(attempt)

    def _step_after_all(self, attempt: StepAttempt, call: ScalerCall) -> Any:
        """The scaler has skipped an optimizer whose gradients are finite by now."""
        self.attempts.current = attempt
        try:
            named = {name: value for name, value in call.kwargs.items() if value is not call.argument}
            return call.argument.step(*call.args[1:], **named)
        except BaseException:
            self._tape.weights_moved()
            raise
        finally:
            self.attempts.current = None
            self._cycle.leave(State.STEPPING)

    @property
    def is_idle(self) -> bool:
        """Whether neither a step nor an attempt has begun."""
        return self.attempts.current is None and not self._cycle.is_open

    # -- the optimizer's own hooks, within AMPscope's own work --------------------------------------------------

    def before_optimizer(self, optimizer: Optimizer, *, with_closure: bool) -> None:
        """An optimizer is about to step: with finite gradients, or without a scaler to judge them."""
        through = self._let_through(optimizer)
        if not through:
            self.settle()
        if self.attempts.current is None and (with_closure or not (self._cycle.is_open or self._shares(optimizer))):
            self._evaluating = optimizer  # forward and backward come while it steps, or there are none
            if not with_closure:
                self._observers.tell(StepObserver.bare_step, BareStep(optimizer, late=True))
            return
        if self.attempts.current is None:
            self.attempts.current = self.attempts.begin(optimizer, None)
            self.attempts.without_scaler(self.attempts.current)
            self.attempts.healed(self.attempts.current)
        if through or self.attempts.current.optimizer is optimizer:
            self._steps(self.attempts.current, optimizer)

    def _let_through(self, optimizer: Optimizer) -> bool:
        """Whether a step is one that a scaler has let through: of what it was told to step, or of what steps for it."""
        attempt = self.attempts.current
        if attempt is None or attempt.scaling is None or (attempt.stepped and attempt is not self._awaited):
            return False
        return attempt.optimizer is optimizer or self.attempts.optimizers.steps_for(attempt, optimizer)

    def _shares(self, optimizer: Optimizer) -> bool:
        """Whether the step is its, too, that another optimizer has ended, without a scaler."""
        ended = self._cycle.opened
        return ended.scaler is None and not ended.by_hand and bool(OptimizerView(optimizer).gradients)

    def closure(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Runs the closure of an optimizer; a class that hands it on to its base comes by here twice."""
        if self._in_closure:
            return call()
        with self._own:
            self._closure_began(optimizer)
        try:
            result = call()
        except BaseException:
            self._closure_lost(optimizer)
            raise
        with self._own:
            self._closure_ended(optimizer)
        return result

    def _closure_began(self, optimizer: Optimizer) -> None:
        """The closure of an optimizer is about to run forward and backward, once more if it has been run before."""
        self._in_closure = True
        if self._evaluating is optimizer:
            self._cycle.leave(State.STEPPING)
            if self.attempts.current is not None:
                self._tape.weights_moved()

    def _closure_ended(self, optimizer: Optimizer) -> None:
        """Judges the gradients that a closure has left as it returns: they are what the optimizer will use."""
        self._in_closure = False
        if self._evaluating is not optimizer:
            return
        if not self._cycle.is_open:
            self._observers.tell(StepObserver.bare_step, BareStep(optimizer, late=True))
        elif self.attempts.current is None:
            self.attempts.current = self.attempts.begin(optimizer, None)
            self.attempts.without_scaler(self.attempts.current)
            self._steps(self.attempts.current, optimizer)
        else:
            self.attempts.gradients_complete()
            self._tape.stop()
            self.attempts.check(self.attempts.current)
            self._cycle.enter(State.STEPPING)

    def _closure_lost(self, optimizer: Optimizer) -> None:
        """The closure was left by an exception, and so was the optimizer."""
        self._in_closure = False
        if self._evaluating is optimizer:
            self._evaluating = self.attempts.current = None

    def start_afresh(self) -> None:
        """Forgets the attempt and the closure in progress: an exception from outside has broken them off."""
        self._in_closure, self._evaluating, self.attempts.current = False, None, None
        self._awaited = None

    def optimizer_is_lost(self, *, another_begins: bool) -> bool:
        """Whether the optimizer that was stepping was left by an exception; the step is taken up again then.

        Args:
            another_begins: Whether the ``step`` of an optimizer is just being entered.
        """
        if self._cycle.state is not State.STEPPING or steps_running() - another_begins >= self._steps_running:
            return False
        self._cycle.leave(State.STEPPING)
        self._evaluating = self.attempts.current = None
        self._tape.weights_moved()  # as far as it came
        return True

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped; one whose class steps through its base has not, until that returns."""
        if self._cycle.state is State.STEPPING and steps_running() > self._steps_running:
            return
        if self._evaluating is optimizer:
            self._evaluating = None
            if self.attempts.current is None and self._cycle.is_open:  # forward and backward ran, but not by a closure
                self.attempts.current = self.attempts.begin(optimizer, None)
                self.attempts.current.stepped = True
                self.attempts.without_scaler(self.attempts.current)
        attempt = self.attempts.current
        if attempt is None or (attempt.optimizer is not optimizer and self._stepping is not optimizer):
            return
        self._stepping = None
        self._cycle.leave(State.STEPPING)
        if self._incidents.sees_ops:
            with self._guard:
                self._incidents.look_at_weights(attempt)
        if attempt.scaling is None or attempt is self._awaited:
            self.attempts.current = self._awaited = None
            self.attempts.end(attempt)

    def _steps(self, attempt: StepAttempt, optimizer: Optimizer) -> None:
        """The optimizer of an attempt, or what steps for it, is about to write into its parameters."""
        attempt.stepped, attempt.late, self._stepping = True, False, optimizer
        self._cycle.enter(State.STEPPING)
        self._steps_running = steps_running()
        self.attempts.check_the_rest(attempt)
        self._observers.tell(StepObserver.optimizer_steps, attempt)


class BreakingOff:
    """Gives the loop back what AMPscope's own work had put aside, wherever that was broken off.

    Args:
        own: The work.
        cycle: Where the step is.
        endings: How it ends.
        observers: Are told that it does not.
        live: The trace of the step in progress.
        tape: Listens to the loop within a step.
        between: Listens to it between two steps.
    """

    def __init__(
        self,
        own: OwnWork,
        cycle: StepCycle,
        endings: Endings,
        observers: Observers,
        live: LiveTrace,
        tape: StepTape,
        between: LoopMode,
    ) -> None:
        self._own = own
        self._cycle = cycle
        self._endings = endings
        self._observers = observers
        self._live = live
        self._tape = tape
        self._between = between

    def interrupted(self) -> None:
        """The loop's own exception came in between: the step in progress is given up."""
        collector.go_on()
        self._own.start_afresh()
        self._cycle.start_afresh()
        self._endings.start_afresh()
        if self._cycle.is_open:
            self._observers.tell(StepObserver.abandoned, "the step was interrupted")
        self._tape.mode.remove()
        self._between.remove()
        ModuleStack.remove_all()

    def leave_alone(self) -> None:
        """AMPscope itself has failed: nothing of it stays between the loop and torch."""
        own = self._own
        put_aside = (own.start_afresh, self._live.drop, self._between.remove, self._tape.stop, own.remove_modes)
        for leave in (collector.go_on, *put_aside):
            surely(leave)

    def leave_ended_loop(self) -> None:
        """Does as `leave_alone`, for a loop whose thread has ended, with its stacks."""
        self._between.let_go()
        self.leave_alone()

    def leaving(self, home: HomeThread) -> Callable[[], None]:
        """Chooses the function that takes AMPscope off the stacks of the loop's thread."""
        if home.goes_on_elsewhere:
            return partial(self.sweep_later, home)
        return self.leave_ended_loop if home.is_elsewhere else self.leave_alone

    def close_here(self) -> None:
        """The run is closed in this thread, while the loop may be in the midst of a step in its own."""
        self._own.leave_to_this_thread()
        self._tape.guard.broken = self._live.guard.broken = True  # what listens there passes on what it hears
        self._between.leave_off()

    def sweep_later(self, home: HomeThread) -> None:
        """Has what is on the stacks of the loop's thread taken away there, once it comes by after `close_here`."""
        if self._live.active or self._between.inserted or self._tape.mode.inserted or not self._live.sweep():
            process_hooks.leave_behind(self._is_swept, self._loop_ended, home)

    def _is_swept(self) -> bool:
        """Takes away what listens, in the loop's thread; returns whether all of it is gone."""
        self._live.drop()
        self._between.remove()
        self._tape.stop()
        return self._live.sweep() and not self._between.inserted and not self._tape.mode.inserted

    def _loop_ended(self) -> None:
        """The loop's thread has ended, with its stacks."""
        self._between.let_go()
        self._is_swept()
