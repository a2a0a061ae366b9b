"""Watches which torch function of the user's runs, from which line, under which autocast region."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampscope.capture.torch_support import tensor_tree, torch_private
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing.executions import Circumstances
from ampscope.capture.tracing.program.places import Places

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
