"""While an op runs it is known which module and which torch function it belongs to, under which autocast region."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.torch_support import call_state, guard, tensor_tree, torch_private
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.modes import chooses_by_modes
from ampscope.capture.torch_support.threads import origin
from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing.executions import Circumstances
from ampscope.capture.tracing.places import Places


class ModuleStack:
    """The modules that are running, and the two modes while they are inserted.

    Args:
        names: Qualified names of the watched modules by ``id``.
        ops: The mode that sees every op.
        functions: The mode that sees every torch function.
    """

    #: All that are in place, each with its thread.
    _inserted: ClassVar[list[tuple[int, ModuleStack]]] = []

    def __init__(self, names: dict[int, str], ops: TorchDispatchMode, functions: TorchFunctionMode) -> None:
        self.innermost: str | None = None  #: qualified name; None in a module that nobody watches, and outside of all
        self._names = names
        self._ops = ops
        self._functions = functions
        self._running: list[str | None] = []
        self._hooks: list[Any] = []
        self._recomputed_at: int | None = None  # depth of the recomputed module at which functions are watched again
        self._thread = 0  # whose modules they are
        self._fast_paths = 0  # fused evaluation modules entered, during which nothing is observed

    def insert(self) -> None:
        """Puts the modes on the stacks, below any that the user has entered, and follows the modules."""
        self._inserted.append((threading.get_ident(), self))
        self._step_back()
        self._thread = origin()
        self._hooks.append(register_module_forward_pre_hook(guard.told_by_hook(self._enter)))
        self._hooks.append(register_module_forward_hook(guard.told_by_hook(self._leave), always_call=True))

    def remove(self) -> None:
        """Takes the modes off the stacks, wherever they are; safe to call twice."""
        self._fast_paths = 0
        guard.surely(self._step_aside)
        for hook in self._hooks:
            guard.surely(hook.remove)
        self._hooks = []
        self._running.clear()
        self.innermost = None
        self._inserted[:] = [each for each in self._inserted if each[1] is not self]

    @classmethod
    def remove_all(cls) -> None:
        """Removes those of this thread, also where their own removal was broken off."""
        for thread, stack in list(cls._inserted):
            if thread == threading.get_ident():
                guard.surely(stack.remove)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if origin() != self._thread:
            return
        self.innermost = self._names.get(id(module), self.innermost)
        self._running.append(self.innermost)
        if _is_left_alone(module):
            self._step_aside()
            self._fast_paths += 1
        elif self._recomputed_at is None and torch_private.current_backward_node() is not None:
            self._watch_functions_again()

    def _leave(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if origin() != self._thread:
            return
        if self._recomputed_at == len(self._running):
            torch_private.remove_function_mode(self._functions)
            self._recomputed_at = None
        if self._running:
            self._running.pop()
            self.innermost = self._running[-1] if self._running else None
        if _is_left_alone(module) and self._fast_paths:
            self._fast_paths -= 1
            self._step_back()

    def _watch_functions_again(self) -> None:
        """For a module that is recomputed: backward itself has put the function mode aside."""
        if self._functions not in torch_private.function_modes():
            torch_private.insert_function_mode(self._functions)
            self._recomputed_at = len(self._running)

    def _step_aside(self) -> None:
        """Leaves the stacks, outside of any op, until `_step_back`."""
        if not self._fast_paths:
            torch_private.remove_dispatch_mode(self._ops)
            torch_private.remove_function_mode(self._functions)

    def _step_back(self) -> None:
        if not self._fast_paths:
            torch_private.insert_function_mode(self._functions)
            torch_private.insert_dispatch_mode(self._ops)


def _is_left_alone(module: nn.Module) -> bool:
    """Whether modes would change what a module computes, or the graph that torch makes of its call.

    While Dynamo makes one no hook is told of a call.
    """
    return chooses_by_modes(module) or torch_private.records_calls()


_PLAIN = frozenset({Tensor, nn.Parameter})


class FunctionWatch(TorchFunctionMode):
    """A function mode that knows the call being made, for the ops that it leads to.

    Args:
        places: Finds the user's line.
        guard: Catches faults of the tracer.
    """

    def __init__(self, places: Places, guard: Guard) -> None:
        super().__init__()
        self.function = ""  #: name of the function
        self.region: torch.dtype | None = None  #: dtype of the autocast region; None outside
        self.creates_graph = False  #: the backward in progress records a graph of itself
        self.unwraps = False  #: the function is answered by the class of one of its operands, in code of its own
        self.met: Circumstances | None = None  #: those of the latest op of the call, outside of backward
        self.listener: Callable[[Any, Any], None] | None = None  #: is told of each function and its arguments, before
        self.handling = 0  #: calls and ops in progress: inside one, torch has taken a mode off its stack by itself
        self._places = places
        self._guard = guard
        self._types = tuple(reversed(call_state.device_types()))
        self._place: Place | None = None
        self._call: tuple[FrameType, Any] | None = None  # the caller's frame, and the autograd node being evaluated

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = (self.function, self._place, self._call, self.region, self.creates_graph, self.unwraps, self.met)
        self.handling += 1
        try:
            self.met = None
            self.unwraps = not _PLAIN.issuperset(types)
            if self.listener is not None:
                self.listener(func, args)
            if not self._guard.broken:
                try:  # and not the guard around it: this is done for every function
                    self._note(func, args, kwargs, sys._getframe(1))
                except BaseException:
                    with self._guard:
                        raise
            return func(*args, **kwargs)
        finally:
            self.handling -= 1
            (self.function, self._place, self._call, self.region, self.creates_graph, self.unwraps, self.met) = before

    @property
    def place(self) -> Place | None:
        """The user's line of the call being made, found when an op asks for it; None outside of any call."""
        if self._place is None and self._call is not None:
            self._place = self._places.of_call(*self._call)
        return self._place

    def _note(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> None:
        self.function = getattr(func, "__name__", "")
        self._place, self._call, self.region = None, (caller, torch_private.current_backward_node()), None
        for kind in self._types:
            if torch.is_autocast_enabled(kind):
                self.region = torch.get_autocast_dtype(kind)
                break
        if func is torch.autograd.grad:
            self._places.marked.read(tensor_tree.tensors(args[0] if args else kwargs.get("outputs")))
            self.creates_graph = bool(args[4] if len(args) > 4 else kwargs.get("create_graph"))
