"""What AMPscope hears of ``torch.compile`` while a scope is open: its first use, and calls of compiled modules.

A compiled module is another object than the module it was made of; a loop may call it although the scope watches that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import nn

from ampscope.capture.torch_support import dynamo


class CompileListener(Protocol):
    """What a scope is told."""

    def compiles(self) -> None:
        """``torch.compile`` is called."""

    def compiled_called(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A compiled module is called: runs it, with ``call``, and returns what that returned."""


_listeners: list[CompileListener] = []
_originals: dict[str, Any] = {}


def join(listener: CompileListener) -> None:
    """Starts telling ``listener``."""
    if not _listeners:
        _originals["compile"] = torch.compile
        torch.compile = _heard(torch.compile)  # restored in leave
    _listeners.append(listener)
    meet_dynamo()


def leave(listener: CompileListener) -> None:
    """Stops telling ``listener``; nothing of AMPscope is left in torch after the last one."""
    if listener not in _listeners:
        return
    _listeners.remove(listener)
    if not _listeners:
        _restore(torch, "compile")
        _restore(_originals.pop("module", None), "__call__")


def _restore(owner: Any, name: str) -> None:
    """Puts an original back, unless somebody else has put something around ours, which then only passes calls on."""
    if owner is not None and getattr(vars(owner)[name], "ampscope_heard", False):
        setattr(owner, name, _originals.pop(name))


def meet_dynamo() -> None:
    """Does what can be done only once Dynamo is loaded; costs nothing where it is not, or was met before."""
    module = dynamo.optimized_module()
    if module is not None and _listeners:
        dynamo.leave_own_code_alone()
        if "module" not in _originals:
            _originals["module"], _originals["__call__"] = module, module.__call__
            module.__call__ = _module_heard(module.__call__)


def _heard(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` that says it is used."""

    @wraps(compiler)
    def heard(*args: Any, **kwargs: Any) -> Any:
        for listener in _listeners:
            listener.compiles()
        result = compiler(*args, **kwargs)
        meet_dynamo()
        return result

    heard.ampscope_heard = True  # type: ignore[attr-defined]
    return dynamo.breaks_graph(heard)


def _module_heard(original: Callable[..., Any]) -> Callable[..., Any]:
    """The call of compiled modules, each scope around the next."""

    @wraps(original)
    def heard(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = partial(original, module)
        for listener in _listeners:
            call = _through(listener, module, call)
        return call(*args, **kwargs)

    heard.ampscope_heard = True  # type: ignore[attr-defined]
    return heard


def _through(listener: CompileListener, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: listener.compiled_called(module, call, args, kwargs)
