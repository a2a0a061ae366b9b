"""The calls of a ``GradScaler`` that its run wants to hear of: what stands in its classes' methods, and who listens.

Nothing is stored in a scaler, and its class stays what it is: ``type``, ``pickle`` and ``deepcopy`` see it as it was. A
call of a scaler that nobody watches goes straight on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch

from ampscope.capture.events import ScalerCall, ScalerMethod
from ampscope.capture.torch_support import guard
from ampscope.capture.torch_support.threads import HomeThread, Listeners, changing


class ScalerListener(Protocol):
    """One scope's view of a scaler; see `ampscope.capture.step.step_watch.ScalerWatch`."""

    def called(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        """A method was called: runs it, with ``proceed``, and returns what that returned."""


class _Watched(NamedTuple):
    """A scaler, and the scopes that listen to it: usually one; several when several models are watched apart."""

    scaler: weakref.ref[Any]
    present: Listeners[ScalerListener]


class _Method(NamedTuple):
    """A replaced method of a class: the original, and the replacement."""

    original: Callable[..., Any]
    ours: Callable[..., Any]


class _Here(threading.local):
    """Holds for each thread which scaler methods run in it."""

    def __init__(self) -> None:
        self.running: set[tuple[int, str]] = set()  #: methods, by the ``id`` of their scaler


_watched: dict[int, _Watched] = {}  # by ``id``: a class may have made its scalers unhashable
_methods: dict[tuple[type, str], _Method] = {}
_here = _Here()


def announced(
    listeners: Iterable[ScalerListener], method: ScalerMethod, args: Any, kwargs: Any, proceed: Callable[[], Any]
) -> Any:
    """Runs ``proceed`` with each of ``listeners`` around it; each gets the call for itself, to fill in."""
    for listener in listeners:
        proceed = partial(listener.called, ScalerCall(method, args, kwargs), proceed)
    return proceed()


def is_watched(scaler: Any) -> bool:
    """Whether anybody listens to ``scaler``."""
    return _found(scaler) is not None


def join(scaler: Any, listener: ScalerListener, home: HomeThread) -> None:
    """Tells ``listener`` what ``scaler`` does from now on, in its thread.

    Raises:
        TypeError: Python does not allow another method in the scaler's class.
    """
    with changing:
        watched = _found(scaler)
        if watched is None:
            watched = _watched[id(scaler)] = _Watched(weakref.ref(scaler), Listeners())
        for kind in type(scaler).__mro__:
            for method in ScalerMethod:
                if method in vars(kind) and (kind, method) not in _methods:
                    _put(kind, method)
        watched.present.join(listener, home)


def leave(scaler: Any, listener: ScalerListener) -> None:
    """Ends that; the last to leave gives all classes their own methods back."""
    with changing:
        watched = _found(scaler)
        if watched is not None and watched.present.leave(listener):
            del _watched[id(scaler)]
        while _methods and not any(
            each.scaler() is not None and each.present.everywhere() for each in _watched.values()
        ):
            (kind, name), method = _methods.popitem()
            if vars(kind).get(name) is method.ours:  # nobody has put something around it, or taken it away
                setattr(kind, name, method.original)


def _found(scaler: Any) -> _Watched | None:
    watched = _watched.get(id(scaler))
    return watched if watched is not None and watched.scaler() is scaler else None


def _put(kind: type, method: ScalerMethod) -> None:
    original = vars(kind)[method]
    ours = _announced(method, original)
    setattr(kind, method, ours)
    _methods[kind, method] = _Method(original, ours)


def _announced(method: ScalerMethod, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is announced where somebody listens; that of a base, which a subclass's own calls, is not again."""
    name = method.value

    @wraps(original)
    def announced_method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        running, call = _here.running, (id(scaler), name)
        if id(scaler) not in _watched or call in running or torch.compiler.is_compiling():
            return original(scaler, *args, **kwargs)
        running.add(call)
        try:
            return guard.through(partial(_called, scaler, method), partial(original, scaler), args, kwargs)
        finally:
            running.discard(call)

    return announced_method


def _called(scaler: Any, method: ScalerMethod, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    watched = _watched.get(id(scaler))
    if watched is None or watched.scaler() is not scaler:
        return call(*args, **kwargs)
    return announced(watched.present, method, args, kwargs, partial(call, *args, **kwargs))
