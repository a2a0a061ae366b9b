"""Keeps the tape of the step in progress, with the state it began from: all that a replay of it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.events import (
    BackwardCall,
    ErrorListener,
    FunctionListener,
    ModuleCall,
    ScalerCall,
    ScalerMethod,
    StepAttempt,
    StepObserver,
    StepStart,
)
from ampscope.capture.hooks import process_hooks
from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.tape import functional_calls
from ampscope.capture.tape.after_backward import Routine
from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.functional_calls import FunctionalStep
from ampscope.capture.tape.received_values import ReceivedValues
from ampscope.capture.tape.tape_entry import Entry, EntryKind
from ampscope.capture.tape.tape_mode import TapeMode
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.tape.unscaled_edits import LearnedEdits
from ampscope.capture.tape.weight_writes import (
    IN_FORWARD,
    MOST_CALLS,
    Evaluation,
    ForwardEdits,
    WeightWrites,
    WrittenValues,
)
from ampscope.capture.torch_support import call_state, tensor_tree, torch_private, transforms
from ampscope.capture.torch_support.call_state import Ambient
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.torch_support.process_group import synchronising, wrapper_of
from ampscope.capture.torch_support.user_line import NOWHERE, Place, user_place

_dtype = attrgetter("dtype")


class StepTape(StepObserver):
    """The tape of one step after another; many methods because it hears of all that a step is made of.

    Args:
        models: The watched models.
        listener: Is told of the functions that the loop calls.
        guard: Catches faults of the tape.
        pause: On while AMPscope's own code computes, as the tape's does.
        received: Notes what collectives bring while a call of the tape runs.
    """

    def __init__(
        self,
        models: Models,
        listener: FunctionListener,
        guard: Guard,
        pause: Pause,
        *,
        received: ReceivedValues,
    ) -> None:
        self._models = models
        self.guard = guard
        self._tape = Tape()
        self.state = StateSnapshot(models)  #: what forward may change, as it was when the step began
        self.routine = Routine(models)  #: says when it is listened to after backward
        self.mode = TapeMode(self._tape, listener, guard, pause, self.routine)  #: listens to the loop
        self._listener, self._pause = listener, pause
        self._recalled = False  # what the tape says of the loop's edits in this step is known from another
        self._learned: LearnedEdits | None = None  # in the latest step that was heard to its end
        self._after_backward = 0  # position on the tape at the end of the latest backward
        self._next_call = 0  # likewise of the first call of a watched module since
        self._writes = WeightWrites(models)
        self._judge: Callable[[list[Tensor], WrittenValues], None] | None = None
        self.received = received
        self._evaluation = Evaluation(0)
        self._starts: list[int] = []  # where the latest steps began
        self._entry: Entry | None = None  # of the call in progress
        self._draws_on_host = False  # the forward draws from Python's or NumPy's global generator
        self._edits = ForwardEdits(models)
        self.half_forward = False  #: a forward ran in float16

    # -- listening to the loop's own calls ----------------------------------------------------------------------

    def listen(self) -> None:
        """Puts the loop's own calls onto the tape."""
        with self.guard:
            self.mode.recording, self.mode.edits = True, None
            self.mode.insert()

    def listen_after_backward(self, *, traced: bool) -> None:
        """Listens to the loop after a backward, unless it is known what comes.

        Args:
            traced: Each op of the step is recorded.
        """
        with self.guard:
            if self.routine.listens(traced=traced):
                self.listen()
            else:
                self.mode.recording, self.mode.edits = True, None
                self._listener.is_unheard()

    def steps_aside(self, call: ScalerCall) -> bool:
        """Leaves torch's stack for a call of a scaler's, until `TapeMode.step_back`; returns whether it was there.

        Not for a ``scale`` of which it is not known what it computes: another's than torch's, or of several losses.
        """
        mode = self.mode
        if mode.inserted and call.method is ScalerMethod.SCALE:
            is_plain = type(call.scaler) is torch.amp.GradScaler and type(call.argument) is Tensor
            is_otherwise = mode.otherwise is not None and mode.otherwise.of_step
            if not is_plain or not mode.recording or is_otherwise:
                return False
            try:  # as ``with self.guard``, in fewer calls
                call.ambient = call_state.ambient_now(call_state.device_types())
            except BaseException as error:
                if not self.guard.catches(error):
                    raise
                return False
        return mode.step_aside()

    def _scaled(self, call: ScalerCall, ambient: Ambient) -> None:
        """Puts a ``scale`` onto the tape that was not heard."""
        result, loss, scale = call.result, call.argument, torch_private.scaler_tensors(call.scaler)[0]
        if scale is not None and isinstance(result, Tensor):
            known: dict[str, Any] = {"place": user_place() or NOWHERE, "random": None, "originals": {}}
            self._tape.function_call(torch.mul, (loss, scale), {}, result, ambient=ambient, **known, in_place=False)
            self._listener.scaled(loss, scale, result)

    def unheard(self, call: Callable[[], Any]) -> Any:
        """Runs a call of torch's own, of which nothing is to be heard."""
        listening = self.stop()
        try:
            return call()
        finally:
            if listening:
                self.mode.insert()

    def complete(self) -> None:
        """Puts nothing more onto the tape, but goes on to see whether the loop moves weights by itself."""
        if self.mode.recording:
            self.received.complete()
        self.mode.complete()

    def stop(self) -> bool:
        """Puts nothing more onto the tape; returns whether it was listening."""
        if not self.mode.inserted:
            return False
        with self.guard:
            return self.mode.remove()
        return False

    def on_error(self, listener: ErrorListener) -> None:
        """Tells a listener of each torch function of the loop's that raises."""
        self.mode.on_error(listener)

    def on_gradients(self, listener: Callable[[], None]) -> None:
        """Tells a listener when the loop has asked for gradients, which no parameter may hold."""
        self.mode.on_gradients(listener)

    def on_weights_move(self, judge: Callable[[list[Tensor], WrittenValues], None]) -> None:
        """Has ``judge`` called with weights that the loop itself is about to move, and what they are written with."""
        self._judge = judge

    # -- the step -----------------------------------------------------------------------------------------------

    def optimizer_comes(self, attempt: StepAttempt, place: Place | None) -> bool:
        """An optimizer is about to step, or be skipped; returns whether the loop has done what it always does.

        Args:
            attempt: Its attempt.
            place: The user's line; None where that is to be looked for.
        """
        if self.mode.edits is not None and self.routine.is_awake:
            self.routine.edits = self.mode.edits.edited
        unheard = not self.routine.is_awake
        expected = self.routine.comes("step", attempt.optimizer, place or user_place() or NOWHERE)
        if unheard and not expected:
            self._listener.is_unheard(known=False)
        return expected

    @property
    def scales_by_hand(self) -> bool:
        """Whether gradients hold a scale of the loop's own."""
        return self._listener.scales_by_hand

    def forget_edits(self) -> None:
        """Drops what was learned: the loop does another thing to the gradients of another optimizer."""
        self._learned = None

    def learn_edits(self) -> None:
        """The gradients are as the optimizer will use them, and good: notes how the loop has made them."""
        edits, evaluation = self.mode.edits, self._evaluation
        if not self.routine.is_awake or self.routine.always or not evaluation.backwards:
            return
        self._learned = None
        if edits is None or edits.may_be_learned:
            self.write_edits()
            if not (evaluation.earlier or self._tape.obstacle or self._tape.full):
                self._learned = LearnedEdits.of(self._tape, self._models, evaluation.since, self._after_backward)

    def write_edits(self) -> None:
        """Puts onto the tape what the loop did to its gradients after they were unscaled."""
        if not self.routine.is_awake:
            self._recall(unscaled=True)
        elif self.mode.edits is not None:
            self.mode.edits.write()

    def _recall(self, *, unscaled: bool) -> None:
        """Puts onto the tape what the loop did unheard, as it is known from a step that was heard."""
        learned, since = self._learned, self._evaluation.since
        if learned is not None and learned.after == self._after_backward - since:
            learned.put(self._tape, self._models, since, unscaled=unscaled)
            self._recalled = True

    def step_began(self, start: StepStart) -> None:
        """Forgets what no step of any optimizer depends on any more.

        Optimizers that take turns (a GAN's) share results between their steps, so as many steps are kept. A step that
        is still undecided keeps the tape so far to itself.
        """
        if start.apart:
            self._tape = self.mode.recorded = Tape()
            self.state = StateSnapshot(self._models)
            self._starts.clear()
        else:
            end = self._tape.end
            self._starts = [*self._starts, self._evaluation.since, end][-start.optimizers :]
            self._tape.forget_before(self._starts.pop(0) if start.optimizers > 1 else end)
        self._tape.results.forget_written()
        self.routine.begin(start.number)
        self._recalled = False
        self.mode.step_began()
        self._begin(Evaluation(self._tape.end))

    def _begin(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._models.see_what_is_trained()
        self._writes.forget()
        self.received.step_began(self._tape)
        self.mode.watcher = self._before_function
        self.state.take()

    def weights_moved(self) -> None:
        """An optimizer has had the weights, in mid-step; what came before was judged before it got them."""
        self._evaluation.moved = self._evaluation.judged = True

    def _before_function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Has the step judged as far as it has come, if the loop is about to move weights by itself."""
        weights = self._writes.written(func, args, kwargs)
        if not weights:
            return
        evaluation = self._evaluation
        self.routine.always = True
        self.mode.weights_move(func, args, kwargs)
        evaluation.moved = True
        if self._judge is not None and (evaluation.backwards or self.functional.asked is not None):
            evaluation.judged = True
            evaluation.updates = list(self._writes.updates(func, args, kwargs, weights))
            self._judge(weights, self._writes.values(func, args, kwargs))
            evaluation.updates = []

    def call_began(self, call: ModuleCall) -> None:
        """Puts the call of a watched module onto the tape."""
        module, learning, evaluation = call.module, call.learning, self._evaluation
        before = evaluation.versions.get(id(module))
        if evaluation.moved or (before is not None and before != self._models.versions(module)):
            self._tape.forget_before(self._tape.end)
            self._begin(evaluation.another(self._tape.end))
        if not self._evaluation.takes_call():
            self._tape.clear()
            self._tape.obstacle = f"more than {MOST_CALLS} calls or micro-batches came without an optimizer step"
        through = call.through
        place = user_place() or NOWHERE
        self.routine.comes("call", module, place)
        self._next_call = self._next_call or self._tape.end
        entry = self._tape.module_call(
            module,
            *((through.args, through.kwargs) if through is not None else (call.args, call.kwargs)),
            ambient=call.ambient,
            place=place,
            devices=self._models.devices,
            host_random=learning or self._draws_on_host,
        )
        if through is not None:
            entry.through = functional_calls.called_through(through, self._tape, self._models)
        entry.versions = self._models.versions(module)
        wrapper = wrapper_of(module)
        entry.synchronised_by = synchronising(wrapper)
        self._evaluation.wrapped |= wrapper is not None
        entry.state.training = [each.training for each in self._models.modules]
        self._edits.call_began(looks=learning)
        self.half_forward |= entry.state.ambient.autocast_dtype is torch.float16
        self._entry = entry
        self.received.begin(entry)

    def call_ended(self, call: ModuleCall, result: Any) -> None:
        """Notes what the call returned, and whether it changed what it must not."""
        entry, self._entry = self._entry, None
        self.received.end()
        if entry is None:
            return
        if entry.through is not None and call.through is not None and not entry.through.lends:
            self.mode.transformed(call.through.inside.factors, result)
            self.half_forward |= call.through.inside.half
            entry.through.leaves = functional_calls.gradient_leaves(result, self._models)
            entry.through.value = transforms.value_of(entry.through.call, result)
        if call.is_foreign:
            entry.kind = EntryKind.FUNCTION  # of the loop's own
        self._tape.returned(entry, result)
        self.half_forward |= torch.float16 in map(_dtype, tensor_tree.tensors(result))
        if call.learning:
            self._draws_on_host |= entry.state.random is not None and not entry.state.random.host_unchanged()
        self._edits.call_ended()
        versions = self._evaluation.versions[id(call.module)] = self._models.versions(call.module)
        if self._edits.seen() or entry.versions != versions:
            self._tape.obstacle = IN_FORWARD

    def call_lost(self, call: ModuleCall) -> None:
        """Takes the call off the tape again."""
        entry, self._entry = self._entry, None
        self.received.end()
        if entry is not None:
            self._tape.take_back(entry)

    @property
    def is_empty(self) -> bool:
        """Whether the present step has nothing on the tape."""
        return self._tape.end <= self._evaluation.since and not self._evaluation.earlier

    def holds_nothing_but(self, call: ModuleCall) -> bool:
        """Whether the present step has nothing on the tape but the latest call."""
        return self._tape.end - 1 <= self._evaluation.since and not self._evaluation.earlier

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """Marks what multiplied a loss with the loss scale."""
        if call.method is ScalerMethod.SCALE:
            if call.ambient is not None:
                self._scaled(call, call.ambient)
            self._tape.mark_scaled(list(tensor_tree.tensors(call.result)))
        elif self._evaluation.backwards:
            by_loop = call.method is ScalerMethod.UNSCALE and call.by_loop
            expected = not by_loop or self.routine.comes("unscale_", call.argument, call.place or NOWHERE)
            self.mode.scaler_called(call, self._models)
            if not expected:
                self.mode.insert()

    def backward_began(self, backward: BackwardCall) -> None:
        """Puts a backward onto the tape."""
        call = process_hooks.original_backward()
        entry = self._tape.backward_call(call, backward.args, backward.kwargs, backward.ambient)
        entry.begins_afresh = self._evaluation.backward_begins(self._models)
        self._look_at_what_is_read(entry)
        self.received.begin(entry)

    def _look_at_what_is_read(self, backward: Entry) -> None:
        """Notes whether a backward depends on what the loop has computed between the one before and its forward."""
        since, until = self._after_backward, self._next_call or self._tape.end - 1
        if self._evaluation.backwards and since < until and self.routine.is_awake:
            later = [*self._tape.entries[until - self._tape.start :], backward]
            if any(since <= result.entry < until for entry in later for result in entry.earlier):
                self.routine.read_later()

    def add_missing_backward(self, ambient: Ambient) -> Tensor | None:
        """Puts the backward onto the tape that the loop did not call on its latest loss; returns that loss, if any."""
        return self._tape.add_missing_backward(process_hooks.original_backward(), self._evaluation.since, ambient)

    def add_backward_of_bad(self, ambient: Ambient) -> bool:
        """Puts a backward onto the tape of the newest result that is not finite; returns whether there is one."""
        return self._tape.sum_up_bad(ambient) and self.add_missing_backward(ambient) is not None

    def backward_ended(self) -> None:
        """Gradients are there to be touched."""
        self._models.stand_ins.take_up()
        self.received.end()
        self._evaluation.calls = 0
        self._evaluation.backwards += 1
        self.mode.after_backward = True
        self._after_backward, self._next_call = self._tape.end, 0
        self.routine.backward_ended()
        self._tape.gradients.left_by_backward(self._models)

    def let_go(self) -> None:
        """Keeps nothing alive of what was computed so far until the next step, for none of it will be run again."""
        self._evaluation.since = self._tape.end
        self._tape.forget_before(self._evaluation.since)
        self.state.let_go()
        self.received.let_go()

    def abandoned(self, reason: str) -> None:
        """Forgets the step; an incident in it cannot be replayed, for this reason."""
        self.mode.remove()
        self.received.complete()
        self.routine.forget()
        self._learned = None
        self._tape.clear()
        self._tape.obstacle = reason
        self.state.forget()
        self._writes.forget()
        self._evaluation.since = self._tape.end

    def recording(self) -> TapedStep:
        """Returns all that it takes to run the present step again."""
        evaluation = self._evaluation
        if not self.routine.is_awake and evaluation.backwards:
            self._recall(unscaled=False)
        return TapedStep(
            self._tape,
            self.state,
            {},
            evaluation.since,
            had_gradients=evaluation.had_gradients,
            after_unjudged=evaluation.after_unjudged,
            collectives=evaluation.collectives_run(),
            given=self.functional.sources(),
            in_force=self.mode.otherwise.to_repeat if self.mode.otherwise is not None else (),
            edits_weights=partial(self._edits.seen, wait=True),
            recalled=self._recalled,
        )

    @property
    def evaluation(self) -> Evaluation:
        """The present evaluation, as far as it is known."""
        return self._evaluation

    @property
    def functional(self) -> FunctionalStep:
        """The present step where no backward leaves its gradients, as far as it is known."""
        evaluation = self._evaluation
        return FunctionalStep(self._tape, evaluation.since, evaluation.backwards > 0, self._models)

    @property
    def calls(self) -> Tape:
        """The calls of the step so far."""
        return self._tape
