"""Watches which torch function of the user's runs, from which line, under which autocast region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.user_line import Place
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
        self.place: Place | None = None
        self.region: torch.dtype | None = None  #: dtype of the autocast region; None outside
        self.creates_graph = False  #: the backward in progress records a graph of itself
        self.unwraps = False  #: the function is answered by the class of one of its operands, in code of its own
        self.listener: Callable[[Any, Any], None] | None = None  #: is told of each function and its arguments, before
        self.handling = 0  #: calls in progress: inside one, torch has taken the mode off the stack by itself
        self._places = places
        self._guard = guard
        self._types = call_state.device_types()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = (self.function, self.place, self.region, self.creates_graph, self.unwraps)
        self.handling += 1
        try:
            self.unwraps = not _PLAIN.issuperset(types)
            if self.listener is not None:
                self.listener(func, args)
            self._note(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.handling -= 1
            self.function, self.place, self.region, self.creates_graph, self.unwraps = before

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        if self._guard.broken:
            return
        with self._guard:
            self.function = getattr(func, "__name__", "")
            self.place = self._places.now()
            self.region = self._region()
            if func is torch.autograd.grad:
                self._places.marked.read(tensor_tree.tensors(args[0] if args else kwargs.get("outputs")))
                self.creates_graph = bool(args[4] if len(args) > 4 else kwargs.get("create_graph"))

    def _region(self) -> torch.dtype | None:
        enabled = (kind for kind in reversed(self._types) if torch.is_autocast_enabled(kind))
        return next((torch.get_autocast_dtype(kind) for kind in enabled), None)
