"""Tells open scopes of the first use of ``torch.compile``, and of calls of compiled modules.

A compiled module is another object than the module it was made of; a loop may call it although the scope watches that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import nn

from ampscope.capture.torch_support import dynamo, guard
from ampscope.capture.torch_support.models import unwrapped
from ampscope.capture.torch_support.modes import making_graph
from ampscope.capture.torch_support.threads import HomeThread, Listeners, Together, changing

#: Functions of torch that make a graph of a model.
_GRAPH_MAKERS = ((torch.export, "export"), (torch.jit, "trace"), (torch.jit, "trace_module"))


class CompileListener(Protocol):
    """Receives calls around ``torch.compile`` for a scope."""

    def compiles(self) -> None:
        """``torch.compile`` is called."""

    def compiled_called(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A compiled module is called: runs it, with ``call``, and returns what that returned."""


_listeners: Listeners[CompileListener] = Listeners()
_originals: dict[str, Any] = {}
_eager_threads: list[int] = []
_eager_functions = Together(lambda: torch.compiler.set_stance("force_eager"))  # which torch knows for all threads only


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Has this thread run what compiled modules were made of: in a replay, all is eager, and torch need not warn."""
    here = threading.get_ident()
    try:
        _eager_threads.append(here)
        yield
    finally:
        if here in _eager_threads:  # nothing has come from outside before
            _eager_threads.remove(here)


@contextlib.contextmanager
def all_eager() -> Iterator[None]:
    """Has compiled parts run eagerly, where ``torch.compile`` is in use at all."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _eager_functions, run_eagerly():
        yield


def join(listener: CompileListener, home: HomeThread) -> None:
    """Starts telling ``listener`` of what its thread calls."""
    with changing:
        if not _listeners:
            _originals["compile"] = torch.compile
            torch.compile = _heard(torch.compile)  # restored in leave
            for owner, name in _GRAPH_MAKERS:
                _originals[name] = getattr(owner, name)
                setattr(owner, name, _apart(_originals[name]))
        _listeners.join(listener, home)
    meet_dynamo()


def leave(listener: CompileListener) -> None:
    """Stops telling ``listener``; nothing of AMPscope is left in torch after the last one."""
    with changing:
        if _listeners.leave(listener):
            _restore(torch, "compile")
            for owner, name in _GRAPH_MAKERS:
                _restore(owner, name)
            _restore(_originals.pop("module", None), "__call__")


def _restore(owner: Any, name: str) -> None:
    """Puts an original back, unless somebody else has put something around ours, which then only passes calls on."""
    if owner is not None and getattr(vars(owner)[name], "ampscope_heard", False):
        setattr(owner, name, _originals.pop(name))


def meet_dynamo() -> None:
    """Does what can be done only once Dynamo is loaded; costs nothing where it is not, or was met before."""
    if "module" in _originals or not _listeners:
        return
    with changing:
        module = dynamo.optimized_module()
        if module is not None and "module" not in _originals:
            dynamo.leave_own_code_alone()
            _originals["module"], _originals["__call__"] = module, module.__call__
            module.__call__ = _module_heard(module.__call__)


def _heard(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` that says it is used."""

    @wraps(compiler)
    def heard(*args: Any, **kwargs: Any) -> Any:
        for listener in _listeners.everywhere():
            guard.tell(listener.compiles)
        result = compiler(*args, **kwargs)
        guard.tell(meet_dynamo)
        return result

    heard.ampscope_heard = True  # type: ignore[attr-defined]
    return dynamo.breaks_graph(heard)


def _apart(maker: Callable[..., Any]) -> Callable[..., Any]:
    """Calls what makes a graph of a model, with nothing of AMPscope in its way."""

    @wraps(maker)
    def apart(*args: Any, **kwargs: Any) -> Any:
        with making_graph():
            return maker(*args, **kwargs)

    apart.ampscope_heard = True  # type: ignore[attr-defined]
    return apart


def _module_heard(original: Callable[..., Any]) -> Callable[..., Any]:
    """The call of compiled modules, each scope around the next."""

    @wraps(original)
    def heard(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in _eager_threads:
            return unwrapped(module)(*args, **kwargs)
        return guard.through(partial(_chained, module), partial(original, module), args, kwargs)

    heard.ampscope_heard = True  # type: ignore[attr-defined]
    return heard


def _chained(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for listener in _listeners:
        call = _through(listener, module, call)
    return call(*args, **kwargs)


def _through(listener: CompileListener, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: listener.compiled_called(module, call, args, kwargs)
