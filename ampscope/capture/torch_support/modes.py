"""Modes are taken off torch's stacks here: others' for AMPscope's work, its own where they would change numbers."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampscope.capture.torch_support import dynamo, guard, torch_private


def remove_modes(ours: Callable[[Any], bool]) -> None:
    """Takes every mode of ours off both stacks."""
    for stack in (torch_private.function_stack, torch_private.dispatch_stack):
        modes = stack.modes()
        rest = [mode for mode in modes if not ours(mode)]
        if len(rest) != len(modes):
            stack.become(rest)


@contextlib.contextmanager
def modes_at_rest(*kinds: type) -> Iterator[None]:
    """Takes dispatch modes of some classes off their stack for the body; then all are where they were."""
    modes = torch_private.dispatch_stack.modes()
    torch_private.dispatch_stack.become([mode for mode in modes if not isinstance(mode, kinds)])
    try:
        yield
    finally:
        torch_private.dispatch_stack.become(modes)


class OthersAside:
    """Takes the modes of other people off both stacks for AMPscope's own work, so that they do not see it.

    Entered again inside itself it does nothing, and the first end is the end of it.

    Args:
        ours: Whether a mode is one of AMPscope's; those stay, at the bottom.
    """

    __slots__ = ("_dispatch", "_function", "_ours", "are_aside")

    def __init__(self, ours: Callable[[Any], bool]) -> None:
        self._ours = ours
        self._function: list[Any] = []
        self._dispatch: list[Any] = []
        self.are_aside = False  #: some are off the stacks now

    def __enter__(self) -> None:
        if self.are_aside or not (torch_private.function_stack.length() or torch_private.dispatch_stack.length()):
            return
        try:
            self._put_all_aside()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._put_back()
        except BaseException:  # what comes from outside comes once
            self._put_back()
            raise

    def _put_all_aside(self) -> None:
        if torch_private.function_stack.length():
            modes = torch_private.function_stack.modes()
            self._function = [mode for mode in modes if not self._ours(mode)]  # known before they are taken off
            self._put_aside(torch_private.function_stack, modes, self._function)
        if torch_private.dispatch_stack.length():
            modes = torch_private.dispatch_stack.modes()
            self._dispatch = [mode for mode in modes if not self._ours(mode)]
            self._put_aside(torch_private.dispatch_stack, modes, self._dispatch)

    def _put_aside(self, stack: torch_private.ModeStack, modes: list[Any], others: list[Any]) -> None:
        if others:
            self.are_aside = True
            stack.become([mode for mode in modes if self._ours(mode)])

    def _put_back(self) -> None:
        if self._function:
            below = 1 if self._function[0] is torch_private.default_device_mode() else 0
            ours = [mode for mode in torch_private.function_stack.modes() if self._ours(mode)]
            torch_private.function_stack.become([*self._function[:below], *ours, *self._function[below:]])
        if self._dispatch:
            torch_private.dispatch_stack.become(
                [*filter(self._ours, torch_private.dispatch_stack.modes()), *self._dispatch]
            )
        self._function, self._dispatch, self.are_aside = [], [], False


def _is_ours(thing: Any) -> bool:
    module: str = type(thing).__module__
    return module.partition(".")[0] == "ampscope" or hasattr(thing, "ampscope_heard")


def others_aside() -> OthersAside:
    """A context in which the modes of other people see nothing; for work that comes outside of any step."""
    return OthersAside(_is_ours)


@contextlib.contextmanager
def making_graph() -> Iterator[None]:
    """In the body torch makes a graph: AMPscope's modes, and its hooks on all modules, are away, and it hears nothing.

    Dynamo exports no module that has hooks, ``torch.jit.trace`` names values by the Python frames that it meets and
    compares constants with Python code, in which a mode gets numbers in place of tensors.
    """
    stacks = [(stack, stack.modes()) for stack in (torch_private.function_stack, torch_private.dispatch_stack)]
    homes = torch_private.hooks_on_all_modules()
    hooks = [(home, number, hook) for home in homes for number, hook in home.items() if _is_ours(hook)]
    torch_private.graphs.in_the_making += 1
    try:
        for home, number, _ in hooks:
            del home[number]
        remove_modes(_is_ours)
        yield
    finally:
        for stack, modes in stacks:
            stack.become(modes)
        for home, number, hook in hooks:
            home[number] = hook
        torch_private.graphs.in_the_making -= 1


class Pause:
    """One switch for all that hears of a run's calls: it is turned dozens of times a step.

    Attributes:
        on: The calls that come now are AMPscope's own.
        glanced: Seconds that glances have taken.
        cuda: CUDA was in use when the latest step began; only then may anybody be capturing a graph.
    """

    __slots__ = ("_began", "cuda", "glanced", "on", "others")

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.others = OthersAside(lambda _: False)  #: modes of other people, which glances are to go past
        self.glanced = 0.0
        self._began = 0.0
        self.look_for_cuda()

    def look_for_cuda(self) -> bool:
        """A step begins; in between nobody asks, for these calls are many."""
        self.cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self.cuda

    def captures(self) -> bool:
        """Whether what is called now goes into a CUDA graph, which a query, a copy or a wait would spoil."""
        return self.cuda and torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        """Own work begins within a call of the loop's: too short, and too often, to be set apart as other work is.

        Dispatch modes do not see it. Function modes cannot: torch has taken them off for the call.
        """
        self.on = True
        if torch_private.dispatch_stack.length():
            self.others.__enter__()

    def end(self) -> None:
        """Ends AMPscope's own work; the loop goes on."""
        if self.others.are_aside:
            self.others.__exit__()
        self.on = False

    def begin_glance(self) -> None:
        """A glance at one function of the loop's begins: as `begin`, and timed."""
        self._began = time.perf_counter()
        self.on = True
        if torch_private.dispatch_stack.length():
            self.others.__enter__()

    def end_glance(self) -> None:
        """Ends a glance, and adds its time to `glanced`."""
        if self.others.are_aside:
            self.others.__exit__()
        self.on = False
        self.glanced += time.perf_counter() - self._began

    def begin_aside(self) -> None:
        """Begins a glance between two calls of the loop, with its modes set aside; `end_glance` ends it."""
        self.others.__enter__()
        self.begin_glance()


#: What code asks to know whether a mode, or a subclass of Tensor, hears of its calls.
_QUESTIONS = frozenset(
    {
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
        "_is_torch_function_mode_enabled",
        "_len_torch_function_stack",
    }
)
_known: dict[int, tuple[weakref.ref[type], bool]] = {}  # by ``id`` of the class
_listening: set[FastPaths] = set()  # each is held by its hooks, too


def leave_to_dynamo() -> None:
    """Takes all hooks of this room away: ``torch.compile`` warns of hooks on all modules."""
    for each in list(_listening):
        each.remove()


def chooses_by_modes(module: nn.Module) -> bool:
    """Whether a module in evaluation asks for modes, and may take another path where one is active.

    `nn.TransformerEncoder`, its layers and `nn.MultiheadAttention` choose one fused op so.
    """
    if module.training:
        return False
    kind = type(module)
    known = _known.get(id(kind))
    if known is None or known[0]() is not kind:
        codes = [getattr(vars(each).get("forward"), "__code__", None) for each in kind.__mro__]
        asks = any(not _QUESTIONS.isdisjoint(code.co_names) for code in codes if code is not None)
        known = _known[id(kind)] = weakref.ref(kind), asks
    return known[1]


class PausedCall(NamedTuple):
    """The call of a module for which a mode has stepped aside."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class FastPaths:
    """Takes a function mode off the stack for modules that have a fast path, while the mode listens.

    Args:
        leave: Takes the mode off; returns whether it was there.
        come_back: Puts it back; is told of the call, None where that was left by an exception.
    """

    def __init__(self, leave: Callable[[], bool], come_back: Callable[[PausedCall | None], None]) -> None:
        self._leave = leave
        self._come_back = come_back
        self._handles: list[Any] = []
        self._outermost: nn.Module | None = None
        self._thread = 0
        self._hooks = self._made()

    def insert(self) -> None:
        """The mode begins to listen. Compiled code would be compiled again for hooks that come and go."""
        self._outermost = None
        if not self._handles and not dynamo.in_use():
            self._thread = threading.get_ident()
            _listening.add(self)
            before, after = self._hooks
            self._handles.append(register_module_forward_pre_hook(before))
            self._handles.append(register_module_forward_hook(after, always_call=True))

    def _made(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Before and after the call of any module: of most there is nothing to tell, which is asked first."""
        tell_before, tell_after = guard.told_by_hook(self._before), guard.told_by_hook(self._after)

        def before(module: nn.Module, args: Any) -> None:
            recorded = torch_private.tracing_state() is not None or torch_private.graphs.in_the_making
            if recorded or not module.training or getattr(torch_private.symbolic_trace, "_is_fx_tracing_flag", False):
                tell_before(module, args)

        def after(module: nn.Module, args: Any, result: Any) -> None:
            if self._outermost is module:
                tell_after(module, args, result)

        before.ampscope_heard = after.ampscope_heard = True  # type: ignore[attr-defined]  # as of those that they tell
        return before, after

    def remove(self) -> None:
        """Removes the hooks; safe to call twice."""
        self._outermost = None
        _listening.discard(self)
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def _before(self, module: nn.Module, _: Any) -> None:
        if self._outermost is not None or not (torch_private.is_tracing() or chooses_by_modes(module)):
            return
        if threading.get_ident() == self._thread and self._leave():
            self._outermost = module

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._outermost is module and threading.get_ident() == self._thread:
            self._outermost = None
            kwargs = torch_private.forward_kwargs(sys._getframe(4))
            unseen = result is None or torch_private.is_tracing()
            self._come_back(None if unseen else PausedCall(module, args, kwargs, result))
