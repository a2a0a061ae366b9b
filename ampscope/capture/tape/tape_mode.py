"""The torch function mode that writes the loop's own calls (loss, accumulation, scaling) onto the tape."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampscope.capture.events import CallWatcher, ErrorListener, FunctionListener, OtherCalls, ScalerCall, ScalerMethod
from ampscope.capture.tape.after_backward import Routine
from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.unscaled_edits import EditLog
from ampscope.capture.torch_support import call_state, guard, tensor_tree, torch_private
from ampscope.capture.torch_support.call_state import Ambient, RandomState
from ampscope.capture.torch_support.function_names import UNNAMED, FunctionFacts, dtypes_asked, facts_of, known_facts
from ampscope.capture.torch_support.guard import NOT_RUN, Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.modes import FastPaths, Pause, PausedCall
from ampscope.capture.torch_support.user_line import NOWHERE, place_of

_NO_ORIGINALS: dict[int, Tensor] = {}


def _devices(args: Any, kwargs: dict[str, Any]) -> set[torch.device]:
    """Returns the devices on which a function that draws random numbers may do so."""
    named = [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    return {*named, *(tensor.device for tensor in tensor_tree.tensors((args, kwargs)))}


class _Before(NamedTuple):
    """The facts that must be known before a function runs."""

    ambient: Ambient
    random: RandomState | None
    kwargs: dict[str, Any]
    originals: dict[int, Tensor]


class TapeMode(TorchFunctionMode):
    """Active between the first watched forward of a step and its optimizer step, but not inside watched modules.

    Args:
        recorded: Where the calls go.
        listener: Is told of each function.
        guard: Catches faults of the tape.
        pause: On while AMPscope's own code computes, as the tape's does.
        routine: Learns what the loop does after backward.

    Attributes:
        recorded: Where the calls go.
        recording: Whether calls go onto the tape; if not, they are only watched.
        watcher: Looks at the calls, while it is there.
        after_backward: A backward of the step has run.
        otherwise: Makes calls otherwise than they are written, where anything does.
        edits: What the loop does after its gradients were unscaled, for as long as nothing else comes.
    """

    def __init__(
        self,
        recorded: Tape,
        listener: FunctionListener,
        guard: Guard,
        pause: Pause,
        routine: Routine,
    ) -> None:
        super().__init__()
        self.recorded = recorded
        self._types = call_state.device_types()
        self._listener = listener
        self._guard = guard
        self._pause = pause
        self._routine = routine
        self._latest: _Before | None = None
        self._may_compile = True
        self.watcher: CallWatcher | None = None
        self.inserted = False  #: on the stack of the loop's thread, unless torch or a module has taken it off for now
        self._is_aside = False  # off it for a call of a scaler's
        self._handling = 0  # inside a handled function torch has taken this mode off the stack by itself
        self._raised: ErrorListener | None = None
        self._asked: Callable[[], None] | None = None
        self._fast_paths = FastPaths(self._leave, self._come_back)
        self.recording = True
        self.after_backward = False
        self.otherwise: OtherCalls | None = None
        self.edits: EditLog | None = None

    def on_error(self, listener: ErrorListener) -> None:
        """Tells a listener of each function that raises."""
        self._raised = listener

    def on_gradients(self, listener: Callable[[], None]) -> None:
        """Tells a listener when the loop has got gradients by asking for them."""
        self._asked = listener

    def weights_move(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """The loop is about to move weights: what comes after is not looked at."""
        self.watcher = None
        self._pause.begin_glance()
        with self._guard:
            self._listener.weights_move(func, args, kwargs)
        self._pause.end_glance()

    def transformed(self, factors: Iterable[Any], result: Any) -> None:
        """A transform of ``torch.func`` has run in the loop's place, where no function was seen."""
        self._listener.transformed(factors, result)

    def step_began(self) -> None:
        """Forgets the step before: nothing of the new one has run."""
        self.after_backward = False
        if self.otherwise is not None:
            self.otherwise.step_began()

    def complete(self) -> None:
        """Puts nothing more onto the tape."""
        if self.recording and self.otherwise is not None and self.otherwise.of_step:
            self.otherwise.release()
        self.recording = False
        if self.edits is not None:
            self.edits.is_open = False

    def scaler_called(self, call: ScalerCall, models: Models) -> None:
        """Begins to note the loop's edits as it unscales gradients, and ends that at the scaler's update."""
        if call.method is ScalerMethod.UPDATE:
            self.edits = None
        scale = torch_private.scaler_tensors(call.scaler)[0] if call.method is ScalerMethod.UNSCALE else None
        if scale is not None:
            self.edits = self.edits or EditLog(self.recorded, models, edited=self._routine.changes_unheard)
            self.edits.unscaled(call.argument, scale, call.place)

    def insert(self) -> None:
        """Starts listening."""
        if not self.inserted and not self._handling and not self._guard.broken:
            self._may_compile = "torch._dynamo" in sys.modules
            self.inserted = True  # first, and last in `remove`: what is broken off is taken away later
            torch_private.insert_function_mode(self)
            self._fast_paths.insert()

    def remove(self) -> bool:
        """Stops listening; returns whether it was."""
        if self._handling:
            return False  # torch puts it back when the function returns; what follows is none of the tape's
        was = self.inserted
        if was:
            guard.surely(partial(torch_private.remove_function_mode, self))
            guard.surely(self._fast_paths.remove)
            self.inserted = self._is_aside = False
        return was

    def step_aside(self) -> bool:
        """Leaves the stack until `step_back`, as torch has it do for a function; returns whether it was there."""
        if not self.inserted or self._handling or self._is_aside:
            return False
        self._is_aside = True  # first, and last in `step_back`, as in `insert`
        torch_private.remove_function_mode(self)
        return True

    def step_back(self) -> None:
        """Goes on to listen, unless it was removed meanwhile."""
        if self._is_aside:
            torch_private.insert_function_mode(self)
            self._is_aside = False

    def _leave(self) -> bool:
        """Leaves the stack for the call of a module that computes otherwise while a mode is active, if it can."""
        if self._handling or self._is_aside:
            return False
        torch_private.remove_function_mode(self)
        return True

    def _come_back(self, call: PausedCall | None) -> None:
        """Goes back onto the stack after the call of a module for which it has left, and tapes that as one call."""
        torch_private.insert_function_mode(self)
        if call is None or not self.recording or self._pause.on or self._guard.broken:
            return
        self._pause.others.__enter__()
        with self._guard:
            before = _Before(call_state.ambient_now(self._types), None, call.kwargs, _NO_ORIGINALS)
            self._note(UNNAMED, call.module, call.args, before, call.result)

    def __torch_function__(  # noqa: C901, PLR0912  # each frame more would cost every function of the loop's
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result, before, is_loops = NOT_RUN, None, False
        try:
            if self._may_compile and torch.compiler.is_compiling():  # first: Dynamo traces this, as far as it comes
                return func(*args, **kwargs)
            facts = known_facts.get(func) or facts_of(func)
            if facts.asks or (facts.assigns_gradient and len(args) > 1 and args[1] is None):
                return func(*args, **kwargs)
            captured = self._pause.cuda and self._pause.captures()
            recorded = torch_private.tracing_state() is not None or torch_private.graphs.in_the_making
            if captured or recorded or getattr(torch_private.symbolic_trace, "_is_fx_tracing_flag", False):
                return func(*args, **kwargs)
            self._handling += 1
            try:
                if self._pause.on or self._guard.broken or torch_private.functorch_level() is not None:
                    return func(*args, **kwargs)
                is_loops = True
                writes = facts.writes or kwargs.get("out") is not None
                if self.after_backward:
                    self._routine.heard(facts.name, sys._getframe(1), writes=writes or facts.assigns_gradient)
                if writes and self.watcher is not None:
                    with self._guard:
                        self.watcher(func, args, kwargs)
                if not self.recording:
                    return func(*args, **kwargs) if self.edits is None else self._edit(self.edits, func, args, kwargs)
                before = self._before(facts, func, args, kwargs)
                if self.otherwise is not None and self.otherwise.of_step:
                    result = self.otherwise.call(func, args, kwargs)
                else:
                    result = func(*args, **kwargs)
                if before is not None and not self._guard.broken:
                    try:  # as ``with self._guard``, which is two calls more for each function of the loop's
                        self._note(facts, func, args, before, result)
                    except BaseException as error:
                        if not self._guard.catches(error):
                            raise
                    if func is torch.autograd.grad and self._asked is not None:
                        self._asked()
            finally:
                self._handling -= 1
        except BaseException as error:  # noqa: BLE001  # a door
            if is_loops and result is NOT_RUN and isinstance(error, Exception) and self._raised is not None:
                with Suppressed():  # a fault would take the place of the loop's own
                    self._raised(error, func, args, kwargs)
            self._left(error)
        return func(*args, **kwargs) if result is NOT_RUN else result

    def _left(self, error: BaseException) -> None:
        """This has been left by an exception, in the midst of a glance perhaps.

        Raises:
            BaseException: The loop's function has raised it, or it comes from outside.
        """
        if not guard.here.working:
            self._pause.end()
        guard.left(error)

    def _edit(self, edits: EditLog, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function between the unscaling of gradients and the step."""
        if not edits.is_open:
            return func(*args, **kwargs)
        before = None
        self._pause.begin_glance()
        with self._guard:
            before = edits.before(func, args, kwargs)
        self._pause.end_glance()
        result = func(*args, **kwargs)
        if before is not None:
            self._pause.begin_glance()
            with self._guard:
                edits.note(func, args, kwargs, result, before=before, frame=sys._getframe(2))
                self._listener.edited(func, args, kwargs, result)
            self._pause.end_glance()
        return result

    def _before(self, facts: FunctionFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> _Before | None:
        """Takes what must be known before a function runs, the generators' states if it draws; None after a fault."""
        try:
            ambient = call_state.ambient_with(self._types, torch.is_grad_enabled())
            in_place = facts.in_place or facts.writes or kwargs.get("out") is not None
            if not (in_place or facts.draws or "generator" in kwargs):
                if kwargs:
                    return _Before(ambient, None, kwargs, _NO_ORIGINALS)
                if self._latest is None or self._latest.ambient is not ambient:
                    self._latest = _Before(ambient, None, kwargs, _NO_ORIGINALS)
                return self._latest
            self._pause.begin_glance()
            random = RandomState.take(_devices(args, kwargs)) if facts.draws else None
            generator = kwargs.get("generator")
            if generator is not None:
                kwargs = {**kwargs, "generator": generator.clone_state()}
            originals: dict[int, Tensor] = {}
            if in_place:
                is_repeated = not self.after_backward
                originals = self.recorded.overwritten_unknown(args, kwargs, is_repeated=is_repeated)
            self._pause.end_glance()
            return _Before(ambient, random, kwargs, originals)
        except BaseException as error:
            if not self._guard.catches(error):
                raise
        self._pause.end()
        return None

    def _note(self, facts: FunctionFacts, func: Any, args: Any, before: _Before, result: Any) -> None:
        """Takes a function down that has run; as between `Pause.begin_glance` and its end, without their calls."""
        began, self._pause.on = time.perf_counter(), True
        if torch_private.dispatch_stack.length():
            self._pause.others.__enter__()
        try:
            kwargs = before.kwargs
            self._listener.saw_function(func, args, kwargs, result, after_backward=self.after_backward)
            in_place = facts.in_place or kwargs.get("out") is not None
            new = in_place or (type(result) is Tensor and args and result is not args[0])
            if not facts.is_of_gradient and (new or self._makes(func, args, kwargs, result)):
                self.recorded.function_call(
                    func,
                    args,
                    kwargs,
                    result,
                    ambient=before.ambient,
                    place=place_of(sys._getframe(2)) or NOWHERE,
                    random=before.random,
                    originals=before.originals,
                    in_place=in_place,
                )
        finally:
            if self._pause.others.are_aside:
                self._pause.others.__exit__()
            self._pause.on = False
            self._pause.glanced += time.perf_counter() - began

    def _makes(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Whether a function has made tensors."""
        if not isinstance(result, Tensor) and next(tensor_tree.tensors(result), None) is None:
            if self.after_backward and args:
                self.recorded.results.note_read(func, args[0], self.recorded.end)
            return False
        # ``x.to(x.device)``: there is nothing to run again
        return not (args and result is args[0] and not dtypes_asked(func, args, kwargs))
