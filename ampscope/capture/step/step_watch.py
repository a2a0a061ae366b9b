"""Follows one optimizer step after another, until its gradients are complete; how it ends is told by `endings`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from ampscope.capture import events
from ampscope.capture.events import (
    BackwardCall,
    JoinedScaler,
    ModuleCall,
    OpenStep,
    ScalerCall,
    ScalerMethod,
    StepObserver,
    StepStart,
    Through,
    WeightsCast,
)
from ampscope.capture.hooks import scaler_calls
from ampscope.capture.loop_state.loop_mode import LoopMode
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.loop_state.saved_files import SavedFiles
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.step.cycle import Moment, State, StepCycle
from ampscope.capture.step.endings import BreakingOff, Endings
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.loop_endings import LoopEndings
from ampscope.capture.step.observers import Observers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.torch_support import dynamo
from ampscope.capture.torch_support.backward_call import backward_roots, leads_to
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Readback
from ampscope.capture.torch_support.threads import HomeThread
from ampscope.capture.torch_support.user_line import Place, user_place

#: Calls of a scaler that come when the gradients of a step are complete.
_AFTER_BACKWARD = (ScalerMethod.UNSCALE, ScalerMethod.STEP)
#: Calls before which the step before is over, told of or not.
_SETTLING = (ScalerMethod.SCALE, ScalerMethod.STEP, ScalerMethod.UPDATE)


class StepWatch:
    """The step in progress, and whoever observes it; many methods because it is told of every call that matters to it.

    Args:
        models: The watched models.
        recorder: Where rows go.
        readback: Brings values from the device; what has arrived is handed over as each step begins.
        optimizers: Which optimizers are the run's, and their steps.
        cycle: Where the step is.
        own: Marks AMPscope's own work.
        live: The trace of the step in progress.
        tape: What a replay of it needs; it listens to the loop between the calls of watched modules.
        observers: Are told what happens.
        endings: How an optimizer ends the step.
        by_loop: How the loop ends it by itself.
        between: Listens to the loop between two steps.
        files: Takes down to which files the loop saves its state.
        guard: Catches faults of following the step.
    """

    def __init__(
        self,
        models: Models,
        recorder: Recorder,
        readback: Readback,
        optimizers: OptimizerNumbers,
        cycle: StepCycle,
        own: OwnWork,
        live: LiveTrace,
        tape: StepTape,
        observers: Observers,
        endings: Endings,
        by_loop: LoopEndings,
        between: LoopMode,
        files: SavedFiles,
        guard: Guard,
    ) -> None:
        self._models, self._recorder = models, recorder
        self.readback, self.optimizers = readback, optimizers
        self._cycle, self._own, self._observers = cycle, own, observers
        self._live, self._tape = live, tape
        self.received = tape.received  #: is to hear of the collectives of the process
        self._endings, self._by_loop, self._between = endings, by_loop, between
        self._files, self._guard = files, guard
        self._was_listening = False  # until a call began that is not heard: of `Tensor.backward`, a foreign optimizer
        self.breaking_off = BreakingOff(own, cycle, endings, observers, live, tape, between)

    # -- forward: see `module_calls.CallListener` ---------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Any, through: Through | None = None) -> ModuleCall | None:
        """An outermost call of a watched module begins; returns None where it is no part of a step."""
        self._live.sweep()
        self._by_loop.call_comes(through)
        if self._is_busy() or not (events.may_train(through) or self._cycle.is_open):
            self._between.step_aside()
            return None
        with self._own:
            if not self._cycle.is_open:
                self._begin()
            self._tape.stop()
            self._cycle.on(Moment.CALLS)
            call = ModuleCall(module, args, kwargs, self._own.ambient, self._cycle.is_learning, through)
            if not self._tape.guard.broken:
                self._observers.tell(StepObserver.call_began, call)
            return None if self._tape.guard.broken else call

    def leave(self, call: ModuleCall | None, result: Any) -> None:
        """The call has returned."""
        self._between.come_back()
        if call is not None and call.is_foreign and self._tape.holds_nothing_but(call):
            self.lost(call)
        elif call is not None:
            with self._own:
                self._observers.tell(StepObserver.call_ended, call, result)
            self._by_loop.call_returned(call.through)
            self._tape.listen()

    def lost(self, call: ModuleCall | None) -> None:
        """The call was left by an exception: it is not part of the step, and neither is what is traced."""
        self._between.come_back()
        if call is not None:
            self._observers.tell(StepObserver.call_lost, call)
            if self._tape.is_empty:
                self._cycle.on(Moment.IS_EMPTY)
            else:
                self._tape.listen()

    def cast(self, cast: WeightsCast) -> None:
        """The parameters of a watched module have got another dtype."""
        at = cast._replace(step=self.optimizers.step_of(None))
        self._observers.tell(StepObserver.weights_cast, at)

    def _begin(self) -> None:
        """The first watched forward of a step; called within AMPscope's own work."""
        with self._guard:
            self.readback.poll()
            self._recorder.catch_up()
            self._endings.attempts.on_device.decide(wait=False)
            if (self._cycle.is_learning or not self._models.is_current()) and self._models.refresh():
                self._recorder.describe_parameters()
                self.optimizers.look_again()
        self._own.start_over()
        self._cycle.opened = OpenStep(time.perf_counter())
        self._cycle.on(Moment.BEGINS)
        turns = max(len(self.optimizers), 2 if self._cycle.is_early else 1)
        start = StepStart(self._cycle.attempts, turns, self._endings.attempts.on_device.pending, self._own.ambient)
        self._observers.tell(StepObserver.step_began, start)

    def _is_busy(self, *, optimizer_begins: bool = False) -> bool:
        """Whether calls belong to a backward, an optimizer, a replay or a CUDA graph, and not to the loop."""
        busy = self._cycle.is_busy and not self._endings.optimizer_is_lost(another_begins=optimizer_begins)
        if not (busy or optimizer_begins):
            self._endings.settle()
        return busy or (self._own.may_be_unwanted and self.gives_way_to_capture())

    def gives_way_to_capture(self) -> bool:
        """Gives up a step of which a part goes into a CUDA graph; returns whether calls do, to be left alone."""
        if (captured := self._own.may_be_unwanted and self._own.is_unwanted) and self._cycle.is_open:
            self.abandon("a part of the step was captured into a CUDA graph")
        return captured

    # -- backward -----------------------------------------------------------------------------------------------

    def backward_comes(self) -> None:
        """A backward is about to be run: what listens leaves torch's stack, which torch would put back otherwise."""
        if self._cycle.is_open and not self._cycle.is_busy:
            self._was_listening = self._tape.stop() or self._was_listening  # other modes pass the call on to here

    def backward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a backward, of the step or of no step of ours; see `process_hooks.Listener`."""
        listening, self._was_listening = self._was_listening, False
        if self._is_busy():
            return call(*args, **kwargs)
        if not self._cycle.is_open and not self._began_unseen(args, kwargs):
            with self._cycle.inside(State.BACKWARD):  # a watched module that it recomputes does not begin a step
                return call(*args, **kwargs)
        listening = listening or self._tape.stop()
        self._backward_began(args, kwargs)
        try:
            self._cycle.enter(State.BACKWARD)
            try:
                result = call(*args, **kwargs)
            finally:
                self._cycle.leave(State.BACKWARD)
        except BaseException as error:
            leave = self.give_up if isinstance(error, Exception) else self.abandon  # Ctrl+C does not wait for a verdict
            leave("a part of the step was lost to an exception in backward")
            raise
        self._cycle.opened.micro_batches += 1
        self._cycle.on(Moment.RUNS_BACKWARD)
        with self._own:
            self._observers.tell(StepObserver.backward_ended)
        self._by_loop.backward_returned()
        if listening and self._cycle.is_open:
            self._tape.listen_after_backward(traced=self._live.active)
            self._endings.attempts.backward_ended()
        return result

    def _began_unseen(self, args: Any, kwargs: Any) -> bool:
        """Begins a step whose forward ran inside compiled code, unseen, where this backward is the model's."""
        with self._own:
            unseen = False
            with self._guard:
                unseen = dynamo.in_use() and leads_to(backward_roots(args, kwargs), self._models.parameters)
            if unseen:
                self._begin()
            return unseen

    def _backward_began(self, args: Any, kwargs: Any) -> None:
        with self._own, self._guard:
            roots, several = backward_roots(args, kwargs), self._cycle.is_learning or len(self.optimizers) > 1
            call = BackwardCall(args, kwargs, roots, self._own.ambient, several)
            self._observers.tell(StepObserver.backward_began, call)
            self._cycle.opened.backward(roots)
            self._by_loop.backward_comes()

    # -- the scaler ---------------------------------------------------------------------------------------------

    def scaler_joined(self, joined: events.JoinedScaler) -> None:
        """The run has got a scaler."""
        self._observers.tell(StepObserver.scaler_joined, joined)

    def scaler_call(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        """Runs a call of a scaler, and returns what it returned."""
        aside = self._tape.steps_aside(call)
        try:
            self._scaler_call_began(call)
            try:
                call.result = proceed()
            except Exception:
                self._observers.tell(StepObserver.scaler_call_lost, call)
                raise
            self._scaler_call_ended(call)
        finally:
            if aside:
                self._tape.mode.step_back()
        return call.result

    def scaler_step(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        """Runs ``scaler.step``; of the run's own optimizers it is an attempt at a step."""
        optimizer = call.argument
        try:
            if self.optimizers.owns(optimizer):
                self._scaler_call_began(call)
                call.result, call.attempt = self._endings.through_scaler(call, proceed)
            else:  # how another model's optimizer is used is no concern of this run, unless the run ends by it
                self._endings.attempts.gradients_complete()
                call.result = self._tape.unheard(proceed)
        except Exception:
            self._observers.tell(StepObserver.scaler_call_lost, call)
            raise
        self._scaler_call_ended(call)
        return call.result

    def _scaler_call_began(self, call: ScalerCall) -> None:
        with self._own:
            if call.method in _SETTLING:
                self._endings.settle()
            if call.method in _AFTER_BACKWARD:
                self._endings.attempts.gradients_complete()
            elif call.method is ScalerMethod.SCALE:
                if not self._cycle.is_open and self._own.ambient.grad:
                    self._begin()  # the forward ran without gradients, inside a reentrant checkpoint
                self._cycle.opened.scaler = call.scaler
                with self._guard:
                    self._cycle.opened.scaled(call.argument)
            self._observers.tell(StepObserver.scaler_call_began, call)

    def _scaler_call_ended(self, call: ScalerCall) -> None:
        with self._own:
            self._observers.tell(StepObserver.scaler_call_ended, call)
            self._cycle.opened.updated |= call.method is ScalerMethod.UPDATE
            if call.method is ScalerMethod.UNSCALE:
                with self._guard:
                    self._endings.attempts.unscaled(call)

    # -- the optimizer: see `process_hooks.Listener` ------------------------------------------------------------

    def before_optimizer(self, optimizer: Optimizer, *, with_closure: bool) -> None:
        """An optimizer is about to step."""
        owns = self.optimizers.owns(optimizer)
        if self._cycle.state is State.BACKWARD and owns:
            self._by_loop.optimizer_in_backward()
        elif self._is_busy(optimizer_begins=True):
            return
        elif not owns:  # what it does to another model's weights is not heard
            self._was_listening = self._tape.stop() or self._was_listening
            if self._cycle.is_open:
                self._observers.tell(StepObserver.foreign_step, optimizer)
        else:
            with self._own:
                self.optimizers.about_to_step(optimizer)
                if not with_closure and self._endings.is_idle and self.optimizers.comes_again(optimizer):
                    self._begin()
                self._endings.before_optimizer(optimizer, with_closure=with_closure)

    def closure(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Runs the closure of an optimizer."""
        return self._endings.closure(optimizer, call)

    def take_up_listening(self) -> None:
        """A call that is not heard has ended: of another model's optimizer, of a backward that did not come to run."""
        listening, self._was_listening = self._was_listening, False
        if listening and self._cycle.is_open and not self._cycle.is_busy:
            self._tape.mode.insert()

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer of the run has stepped."""
        with self._own:
            self._endings.after_optimizer(optimizer)

    def scheduled(self, scheduler: Any) -> None:
        """A learning rate scheduler steps."""
        self._endings.settle()
        if (optimizer := getattr(scheduler, "optimizer", None)) is not None and self.optimizers.owns(optimizer):
            self._observers.tell(StepObserver.scheduler_stepped, scheduler)

    def region_switched_off(self, device: str) -> None:
        """Torch has switched off an autocast region that the loop made; a replay makes it again."""
        if self._cycle.state is not State.JUDGING:
            self._observers.tell(StepObserver.region_switched_off, device)

    def saved(self, held: object, target: object) -> None:
        """The loop has saved something to a file; a step in progress may have moved weights already."""
        if self._cycle.state is not State.JUDGING:
            with self._own:
                self._endings.settle()
                self._files.saved(held, target, within_step=self._cycle.is_open)

    @property
    def in_progress(self) -> bool:
        """Whether a watched forward has begun a step that no optimizer has ended."""
        return self._cycle.is_open

    def abandon(self, reason: str = "") -> None:
        """Gives up the step in progress: nothing stays installed, and an incident in it cannot be replayed."""
        self._observers.tell(StepObserver.abandoned, reason)

    def give_up(self, reason: str = "", failure: BaseException | None = None) -> None:
        """Judges the step in progress as far as it has come, and abandons it."""
        with self._own:
            self._endings.settle()
            self._by_loop.left_unfinished(failure)
        self.abandon(reason)

    def part_failed(self) -> None:
        """A guard has caught a fault: what the faulty part had installed goes."""
        if self._tape.guard.broken:
            self.abandon()
        if self._live.broken:
            self._live.drop()

    def close(self, end: events.RunEnd, *, loop_goes_on: bool) -> None:
        """Ends for good; judges and writes what is still open, unless the loop goes on with it in its own thread."""
        if loop_goes_on:
            self.breaking_off.close_here()
        with self._guard:
            self._endings.attempts.on_device.decide(wait=True)
        if not loop_goes_on:
            self.give_up(failure=end.failure)
        self.drain()
        self._observers.tell(StepObserver.run_ended, end)
        if not loop_goes_on:
            self._live.sweep()

    def drain(self) -> None:
        """Waits for the values that are on their way."""
        with self._own, self._guard:
            self.readback.drain()


#: Calls that matter of a scaler that is switched off, too.
_ALWAYS = (
    ScalerMethod.STATE_DICT,
    ScalerMethod.LOAD_STATE_DICT,
    ScalerMethod.SET_GROWTH_FACTOR,
    ScalerMethod.SET_BACKOFF_FACTOR,
    ScalerMethod.SET_GROWTH_INTERVAL,
)
#: Calls so frequent, and so little told of, that their line is not looked for.
_UNPLACED = (ScalerMethod.SCALE, ScalerMethod.GET_SCALE)


class ScalerWatch:
    """One scaler of the run.

    Args:
        scaler: The user's scaler.
        number: Its number within the run.
        steps: The step watch.
        guard: Catches faults of looking for the user's line.
        home: The thread of the loop.
    """

    def __init__(self, scaler: Any, number: int, steps: StepWatch, guard: Guard, home: HomeThread) -> None:
        self.scaler = scaler
        self._number = number
        self._steps = steps
        self._guard = guard
        self._home = home
        self._stepping = False

    def join(self) -> None:
        """Hears of the scaler's calls from now on, and tells the run of it."""
        scaler_calls.join(self.scaler, self, self._home)
        self._steps.scaler_joined(JoinedScaler(self.scaler, self._number, self._place()))

    def leave(self) -> None:
        """Leaves the scaler; the last to watch it gives it its own class back."""
        scaler_calls.leave(self.scaler, self)

    def called(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        """See `scaler_calls.ScalerListener`."""
        if (call.method not in _ALWAYS and not self.scaler.is_enabled()) or self._steps.gives_way_to_capture():
            return proceed()
        call.scaler, call.number, call.by_loop = self.scaler, self._number, not self._stepping
        if call.method not in _UNPLACED:
            call.place = self._place()
        if call.method is not ScalerMethod.STEP:
            return self._steps.scaler_call(call, proceed)
        self._stepping = True
        try:
            return self._steps.scaler_step(call, proceed)
        finally:
            self._stepping = False

    def _place(self) -> Place | None:
        try:  # as ``with self._guard``, in fewer calls
            return user_place()
        except BaseException as error:
            if not self._guard.catches(error):
                raise
        return None
