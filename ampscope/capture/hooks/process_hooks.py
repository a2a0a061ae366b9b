"""While a scope is open AMPscope hears process-wide of backward, optimizer steps and a scaler's first use.

Installed when the first scope opens, removed when the last closes.

Torch keeps its stacks of modes for each thread, and none can reach another's. So what a run leaves there when another
thread closes it stays, passes on what it hears, and goes when the loop next comes by a hook of the process.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper, wraps
from types import MethodType, ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import ScalerMethod
from ampscope.capture.hooks import saving_calls
from ampscope.capture.hooks.scaler_calls import ScalerListener, announced
from ampscope.capture.torch_support import dynamo, guard, torch_private
from ampscope.capture.torch_support.optimizer_view import around_every_step
from ampscope.capture.torch_support.threads import HomeThread, Listeners, changing


class Listener(Protocol):
    """Receives process-wide events for a scope; each call must return quickly and never raise."""

    def backward_comes(self) -> None:
        """``Tensor.backward`` is called, and has not looked yet who hears of it."""

    def backward_lost(self) -> None:
        """``Tensor.backward`` has raised, before it came to run a backward perhaps."""

    def backward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a backward pass, with or without taking part in it."""

    def before_optimizer(self, optimizer: Optimizer, *, with_closure: bool) -> None:
        """An optimizer is about to change its parameters, at once or after the closure that it was given."""

    def closure(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Runs a closure that an optimizer was given, with or without taking part in it."""

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has changed its parameters."""

    def scheduled(self, scheduler: Any) -> None:
        """A learning rate scheduler steps."""

    def region_switched_off(self, device: str) -> None:
        """Torch has switched off an autocast region that was asked for, with a warning."""

    def saved(self, held: object, target: object) -> None:
        """Something was saved to a file, by ``torch.save`` or safetensors."""

    def adopt(self, scaler: Any) -> ScalerListener | None:
        """A ``GradScaler`` scales a loss; returns who listens to it from now on, None for what is known or foreign."""


T = TypeVar("T")

_listeners: Listeners[Listener] = Listeners()
_hooks: list[Any] = []
_originals: dict[tuple[Any, str], Any] = {}  # of functions that ours stand for, or are called by
_ours: dict[tuple[Any, str], Any] = {}  # what stands for them
_schedulers: dict[type, Callable[..., Any]] = {}  # classes that step in their own way, with it
_scalers: dict[type, Callable[..., Any]] = {}  # classes that scale in their own way, with it
epoch = deque([0], maxlen=1)  #: how often autocast has forgotten its cast weights; calls of one epoch share them
_begin_epoch = map(epoch.append, itertools.count(1)).__next__


def join(listener: Listener, home: HomeThread) -> None:
    """Starts telling ``listener`` of what its thread calls."""
    with changing:
        if not _listeners:
            _install()
        _listeners.join(listener, home)


def leave(listener: Listener) -> None:
    """Stops telling ``listener``; nothing of AMPscope is left in torch after the last one."""
    with changing:
        if _listeners.leave(listener):
            _uninstall()


def _install() -> None:
    _put_in_place(torch.autograd, "backward", lambda _: _backward)
    _put_in_place(torch.Tensor, "backward", _TensorBackward)
    _put_in_place(torch, "clear_autocast_cache", _counted)
    for owner in saving_calls.owners():
        _put_in_place(owner, saving_calls.name_in(owner), partial(_saving, owner))
    if (common := torch_private.amp_common()) is not None:
        _put_in_place(common, torch_private.UNAVAILABLE, _asked)
    for scaler in _subclasses(torch.amp.GradScaler):
        if "scale" in vars(scaler):  # ``ShardedGradScaler`` does not call the one that it inherits
            _scalers[scaler] = vars(scaler)["scale"]
            scaler.scale = _adopted(vars(scaler)["scale"])  # type: ignore[method-assign]  # restored in _uninstall
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
            _schedulers[kind] = vars(kind)["step"]
            kind.step = _announced(vars(kind)["step"])  # type: ignore[method-assign]  # restored in _uninstall
    _hooks.extend(around_every_step(_EveryListener()))


def _uninstall() -> None:
    _restore(torch.Tensor, "backward")
    _restore(torch.autograd, "backward")
    _restore(torch, "clear_autocast_cache")
    for owner in saving_calls.owners():
        if (owner, saving_calls.name_in(owner)) in _originals:  # safetensors may have come meanwhile
            _restore(owner, saving_calls.name_in(owner))
    common = torch_private.amp_common()
    if (common, torch_private.UNAVAILABLE) in _originals:
        _restore(common, torch_private.UNAVAILABLE)
    while _scalers:
        scaler, scale = _scalers.popitem()
        scaler.scale = scale  # type: ignore[attr-defined]  # the original again
    while _schedulers:
        kind, step = _schedulers.popitem()
        kind.step = step  # type: ignore[attr-defined]  # the original again
    while _hooks:
        _hooks.pop().remove()


def _put_in_place(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has ours called for a function of torch, unless it still is: somebody put something around it meanwhile."""
    if (owner, name) not in _originals:
        original = getattr(owner, name)
        _ours[owner, name] = make(original)
        _originals[owner, name] = original
        setattr(owner, name, _ours[owner, name])


def _restore(owner: Any, name: str) -> None:
    """Puts an original back, unless somebody else has put something around ours, which then only passes calls on."""
    if getattr(owner, name) is _ours[owner, name]:
        setattr(owner, name, _originals.pop((owner, name)))


def _counted(clear: Callable[..., Any]) -> Callable[..., Any]:
    """The function that forgets cast weights, counted; without a line of Python's.

    A region of autocast's calls it in the midst of its end: what came from outside into a line here would leave the
    region switched on.
    """
    both = itertools.starmap(operator.call, itertools.cycle([(_begin_epoch,), (clear,)]))
    return zip(both, both, strict=False).__next__


def _asked(unavailable: Callable[[], bool]) -> Callable[[], bool]:
    """Stands in for torch's question whether there is CUDA: listeners hear where it switches a region off.

    Torch asks as it makes the region, and warns in the name of whoever called for it: no frame of ours may be there.
    """

    @wraps(unavailable)
    def asked() -> bool:
        answer = unavailable()
        if answer and not torch.compiler.is_compiling():
            asking = sys._getframe(1)
            of_region = asking.f_code is torch.autocast.__init__.__code__
            if of_region and asking.f_locals.get("enabled") and asking.f_locals.get("device_type") == "cuda":
                guard.tell(_region_switched_off, "cuda")
        return answer

    return asked


def _region_switched_off(device: str) -> None:
    for listener in _listeners:
        listener.region_switched_off(device)


def _saving(owner: ModuleType, save: Callable[..., object]) -> Callable[..., object]:
    """The function that saves, announced; the same object wherever the same function is kept, as pickling asks."""
    same = (_ours[key] for key, original in _originals.items() if original is save and key[0] is not owner)
    known: Callable[..., object] | None = next(same, None)
    return known or saving_calls.announced(save, _saved)


def _saved(held: object, target: object) -> None:
    for listener in _listeners:
        listener.saved(held, target)


def original_backward() -> Callable[..., Any]:
    """``torch.autograd.backward`` itself."""
    return _originals.get((torch.autograd, "backward"), torch.autograd.backward)  # type: ignore[no-any-return]


def _backward(*args: Any, **kwargs: Any) -> Any:
    call: Callable[..., Any] = original_backward()
    if torch_private.is_tracing():
        return call(*args, **kwargs)
    return guard.through(_told_backward, call, args, kwargs)


class _TensorBackward:
    """``Tensor.backward``: what listens has left torch's stack before torch looks there, and is not put back by it.

    It equals the original: modes and subclasses of the user's are given it, and may look it up.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        update_wrapper(self, original)
        self._original = original

    def __get__(self, tensor: Any, _: Any = None) -> Any:
        return self if tensor is None else MethodType(self, tensor)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        guard.tell(_comes)
        try:
            return self._original(*args, **kwargs)
        except BaseException:
            guard.tell(_lost)
            raise


def _lost() -> None:
    for listener in _listeners:
        listener.backward_lost()


def _comes() -> None:
    for listener in _listeners:
        listener.backward_comes()


def _told_backward(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for listener in _listeners:
        call = partial(_told_one, listener, call)
    return call(*args, **kwargs)


backward_frame = _backward.__code__


def _told_one(listener: Listener, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return listener.backward(call, args, kwargs)


def _subclasses(kind: type[T]) -> Iterator[type[T]]:
    """A class and all that derive from it, as far as they exist."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _subclasses(derived)


def _adopted(scale: Callable[..., Any]) -> Callable[..., Any]:
    """A scaler's ``scale`` that has the scaler adopted; one that calls another's has it done once."""

    @wraps(scale)
    def adopted(scaler: Any, outputs: Any) -> Any:
        if torch_private.is_tracing():
            return scale(scaler, outputs)
        return guard.through(_scales_first, scale, (scaler, outputs), {})

    return adopted


def _scales_first(scale: Callable[..., Any], args: Any, _: Any) -> Any:
    new = list(filter(None, [listener.adopt(args[0]) for listener in _listeners]))
    return announced(new, ScalerMethod.SCALE, args[1:], {}, partial(scale, *args)) if new else scale(*args)


def _announced(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's ``step`` that says so; one inside another's is announced too, and does no harm."""

    @wraps(step)
    def announced(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch_private.is_tracing():
            guard.tell(_scheduled, scheduler)
        return step(scheduler, *args, **kwargs)

    return announced


def _scheduled(scheduler: Any) -> None:
    for listener in _listeners:
        listener.scheduled(scheduler)


class _EveryListener:
    """Passes the steps of optimizers on to all who listen."""

    @dynamo.breaks_graph
    def before_optimizer(self, optimizer: Optimizer, *, with_closure: bool) -> None:
        for listener in _listeners:
            listener.before_optimizer(optimizer, with_closure=with_closure)

    def closure(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        for listener in _listeners:
            call = partial(listener.closure, optimizer, call)
        return call()

    @dynamo.breaks_graph
    def after_optimizer(self, optimizer: Optimizer) -> None:
        for listener in _listeners:
            listener.after_optimizer(optimizer)


_left: set[LeftBehind] = set()


def leave_behind(is_swept: Callable[[], bool], ended: Callable[[], object], home: HomeThread) -> None:
    """Has ``is_swept`` called in the loop's thread until it says that nothing is there any more.

    Args:
        is_swept: Takes away what is there.
        ended: Called, in any thread, when the loop's has ended before.
        home: The thread of the loop.
    """
    with changing:
        if (life := home.life) is None:
            ended()
            return
        left = LeftBehind(is_swept, ended)
        _left.add(left)
        join(left, home)
        weakref.finalize(life, left.thread_ended).atexit = False


class LeftBehind:
    """Hears of the loop's next calls; see `Listener`.

    Args:
        is_swept: Takes everything away; returns whether all of it is gone.
        ended: Called when the thread has ended before that.
    """

    def __init__(self, is_swept: Callable[[], bool], ended: Callable[[], object]) -> None:
        self._is_swept, self._ended = is_swept, ended

    def thread_ended(self) -> None:
        """The loop will not come by any more."""
        with changing:
            if self in _left:
                self._ended()
                self._end()

    def _end(self) -> None:
        with changing:
            _left.discard(self)
            leave(self)

    def _comes_by(self) -> None:
        if self._is_swept():
            self._end()

    def backward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Sweeps, before the backward."""
        self._comes_by()
        return call(*args, **kwargs)

    def backward_comes(self) -> None:
        """See `Listener`."""

    def backward_lost(self) -> None:
        """See `Listener`."""

    def before_optimizer(self, *_: Any, **__: Any) -> None:
        """Sweeps. Torch goes through the hooks of optimizers just now, so its own stay."""
        self._is_swept()

    def closure(self, _: Any, call: Callable[[], Any]) -> Any:
        """Runs the closure."""
        return call()

    def after_optimizer(self, _: Any) -> None:
        """Has swept before."""

    def scheduled(self, _: Any) -> None:
        """Takes away what was left behind, for the loop has come by."""
        self._comes_by()

    def region_switched_off(self, *_: Any) -> None:
        """Takes away what was left behind, for the loop has come by."""
        self._comes_by()

    def saved(self, *_: object) -> None:
        """See `Listener`."""

    def adopt(self, _: Any) -> None:
        """Takes away what was left behind, for the loop has come by."""
        self._comes_by()
