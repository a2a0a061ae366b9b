"""AMPscope's own work in a step: timed, outside autocast, without collectives, not compiled, unseen by others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ampscope.capture.loop_state.loop_mode import LoopMode
from ampscope.capture.tape.tape_mode import TapeMode
from ampscope.capture.torch_support import call_state, dynamo, guard, process_group, torch_private
from ampscope.capture.torch_support.call_state import Ambient
from ampscope.capture.torch_support.modes import OthersAside, Pause, remove_modes
from ampscope.capture.torch_support.own_collectives import NoCollectives
from ampscope.capture.tracing.running_code import FunctionWatch
from ampscope.capture.tracing.tracer import Tracer

CAPTURED = (
    "the loop captures a CUDA graph: what goes into it is left alone, and nothing is seen of what replays of it compute"
)


def _is_ours(mode: object) -> bool:
    return isinstance(mode, (TapeMode, LoopMode, Tracer, FunctionWatch, NoCollectives))


class OwnWork:
    """A context that may be entered again inside itself; a thread waits while another one is in it.

    Autocast is off inside it, and so is inference mode; the weights that autocast has cast stay cast. Leaving a
    ``torch.autocast`` region would let go of those, and what the loop casts anew has another history. So the switch of
    each device type is turned by itself, where it is on.

    Args:
        pause: On while the work lasts: what observes ops leaves it out.
        say: Is told, as a text for the user, why there may be none.

    Attributes:
        may_be_unwanted: CUDA was in use when the latest step began, so `is_unwanted` is to be asked.
        thread: The one that is in it now; None where none is.
    """

    def __init__(self, pause: Pause, say: Callable[[str], object]) -> None:
        self._pause = pause
        self._say = say
        self._has_said = False
        self.may_be_unwanted = pause.cuda
        self._aside, pause.others = OthersAside(_is_ours), OthersAside(_is_ours)
        self._types = call_state.device_types()
        self._switched: list[str] = []  # types of which autocast is switched off
        self._grad = True  # the loop's grad mode
        self._inference: contextlib.AbstractContextManager[None] | None = None
        self._alone = NoCollectives()
        self._may_communicate = True  # as of the latest step's begin
        self._depth = 0
        self.thread: int | None = None
        self._started = 0.0
        self._taken = 0.0
        self._alone_in = threading.RLock()
        self._closed_in: int | None = None  # the thread to which alone work is left
        self._compiler: Any = None  # what Dynamo did with the frames around this work

    @property
    def seconds(self) -> float:
        """The seconds that the work has taken since `start_over`, glances and what is running now included."""
        return self._taken + self._pause.glanced + (time.perf_counter() - self._started if self._depth else 0.0)

    @property
    def ambient(self) -> Ambient:
        """The loop's own autocast and grad mode, around the work that is being done."""
        return call_state.ambient_with(self._types, self._grad, self._switched)

    @property
    def is_unwanted(self) -> bool:
        """Whether a CUDA graph is being captured, into which nothing of it must go; said once."""
        if not self._pause.captures():
            return False
        if not self._has_said:
            self._has_said = True
            self._say(CAPTURED)
        return True

    def leave_to_this_thread(self) -> None:
        """Other threads do no more of it; waits until they are done with what they do."""
        with self._alone_in:
            self._closed_in = threading.get_ident()

    def start_over(self) -> None:
        """A step begins: its work is counted from here."""
        self._taken, self._pause.glanced, self._started = 0.0, 0.0, time.perf_counter()
        self.may_be_unwanted = self._pause.look_for_cuda()
        self._may_communicate = process_group.default_group() is not None

    def start_afresh(self) -> None:
        """Leaves the work after an exception from outside has broken it off: everything is as the loop has it again."""
        if self._depth:
            self._depth = 1
            self.__exit__()
        with contextlib.suppress(RuntimeError):  # not held any more
            while True:
                self._alone_in.release()
        self._pause.end()

    def remove_modes(self) -> None:
        """Takes all of AMPscope's modes off torch's stacks, whoever has put them there."""
        remove_modes(_is_ours)

    def __enter__(self) -> OwnWork:
        self._alone_in.acquire()
        if self._closed_in is not None and self._closed_in != threading.get_ident():
            self._alone_in.release()
            raise guard.RunOverError
        if not self._depth:
            guard.here.working = True  # first, and last in `__exit__`: so a door knows of any that is broken off
            self._grad = torch.is_grad_enabled()
        self._depth += 1
        if self._depth == 1:
            self._started = time.perf_counter()
            self._compiler = dynamo.let_see(None)
            self._pause.on = True
            if torch_private.function_stack.length() or torch_private.dispatch_stack.length():
                self._aside.__enter__()
            for kind in self._types:
                if torch.is_autocast_enabled(kind):
                    self._switched.append(kind)  # first: so it is switched on again, wherever this is broken off
                    torch.set_autocast_enabled(kind, False)
            if torch.is_inference_mode_enabled():
                self._inference = torch.inference_mode(False)
                self._inference.__enter__()
            if self._may_communicate:
                self._alone.enter()
        self.thread = threading.get_ident()  # each time: the outermost may have been broken off before it
        return self

    def __exit__(self, *_: Any) -> None:
        if self._depth == 1:
            self.thread = None
            if self._alone.is_on:
                self._alone.leave()
            if self._inference is not None:  # leaving it switches grad mode on
                self._inference.__exit__(None, None, None)
                self._inference = None
            for kind in self._switched:
                torch.set_autocast_enabled(kind, True)
            self._switched = []
            if torch.is_grad_enabled() != self._grad:  # work that was broken off may have left it otherwise, too
                torch.set_grad_enabled(self._grad)
            if self._aside.are_aside:
                self._aside.__exit__()
            self._pause.on = False
            dynamo.let_see(self._compiler)
            self._taken += time.perf_counter() - self._started
        is_over = self._depth <= 1
        if self._depth:
            self._depth -= 1
            self._alone_in.release()
        if is_over:
            guard.here.working = False
