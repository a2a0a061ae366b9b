"""The calls of a ``GradScaler`` that its run wants to hear of: the instrumented form of a scaler, and who listens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

import torch

from ampscope.capture.events.calls import ScalerCall, ScalerMethod
from ampscope.capture.hooks import instrumented
from ampscope.capture.hooks.listeners import Listeners
from ampscope.capture.torch_support import guard
from ampscope.capture.torch_support.calls.threads import HomeThread, changing


class ScalerListener(Protocol):
    """One scope's view of a scaler; see `ampscope.capture.step.scaler_watch.ScalerWatch`."""

    def called(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        """A method was called: runs it, with ``proceed``, and returns what that returned."""


class ScalerListeners:
    """The scopes that listen to one scaler: usually one; several when several models are watched apart."""

    def __init__(self) -> None:
        self.present: Listeners[ScalerListener] = Listeners()

    def called(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        """Runs a call, each scope around the next."""
        return announced(list(self.present), call, proceed)


def announced(listeners: list[ScalerListener], call: ScalerCall, proceed: Callable[[], Any]) -> Any:
    """Runs ``proceed`` with each of ``listeners`` around it; each gets the call for itself, to fill in."""
    for listener in listeners:
        proceed = partial(listener.called, ScalerCall(call.method, call.args, call.kwargs), proceed)
    return proceed()


def join(scaler: Any, listener: ScalerListener, home: HomeThread) -> None:
    """Tells ``listener`` what ``scaler`` does from now on, in its thread."""
    with changing:
        if not instrumented.is_instrumented(scaler):
            instrumented.instrument(scaler, WatchedScaler, ScalerListeners())
        scaler.ampscope_owner.present.join(listener, home)


def leave(scaler: Any, listener: ScalerListener) -> None:
    """Ends that; the last to leave gives the scaler its own class back."""
    with changing:
        if instrumented.is_instrumented(scaler) and scaler.ampscope_owner.present.leave(listener):
            instrumented.restore(scaler)


class WatchedScaler(instrumented.Instrumented):
    """Behaviour of a scaler that a scope watches: each `ScalerMethod` does what it did, and is announced."""

    ampscope_owner: ScalerListeners


def _called(scaler: WatchedScaler, method: ScalerMethod, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return scaler.ampscope_owner.called(ScalerCall(method, args, kwargs), partial(call, *args, **kwargs))


def _announced(method: ScalerMethod) -> Callable[..., Any]:
    @wraps(getattr(torch.amp.GradScaler, method))
    def announced_method(self: WatchedScaler, *args: Any, **kwargs: Any) -> Any:
        original = getattr(super(WatchedScaler, self), method)
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return guard.through(partial(_called, self, method), original, args, kwargs)

    return announced_method


for each in ScalerMethod:
    setattr(WatchedScaler, each, _announced(each))
