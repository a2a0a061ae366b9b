"""Modules that compute otherwise, to other bits, while a function mode is active: one that listens leaves them be."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampscope.capture.torch_support import dynamo, guard, torch_private

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


class Call(NamedTuple):
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

    def __init__(self, leave: Callable[[], bool], come_back: Callable[[Call | None], None]) -> None:
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
            self._come_back(None if unseen else Call(module, args, kwargs, result))
