"""Tells open scopes of ``torch.func``: transforms, and calls of modules with other weights.

A transform (``vmap``, ``grad``, ``jacrev``) calls a model with tensors that stand for others, where nothing can be
noted. So it is noted from outside, as one call, together with the tensors that it reads besides its arguments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampscope.capture.events import InsideTransform, Through
from ampscope.capture.torch_support import call_state, guard, tensor_tree, torch_private, transforms
from ampscope.capture.torch_support.threads import HomeThread, Listeners, changing
from ampscope.capture.torch_support.transforms import Transform

#: Times that a function is transformed without a call of a watched model before it begins no more steps.
TRIES = 2


_PRODUCTS = frozenset(("mul", "multiply"))


class Exchange(NamedTuple):
    """Says how the tensors that a transform reads from outside are noted, or replaced by others."""

    of: Callable[[Tensor], Tensor]
    again: bool  #: the transform is being run again, on other tensors
    inside: InsideTransform | None = None  #: takes what else there is to see


class Experience:
    """Learns which functions, once transformed, call a watched model in training; the others begin no step."""

    def __init__(self) -> None:
        self._in_vain: dict[int, tuple[Any, int]] = {}  # by ``id``: the code, which keeps it, and how often

    def promises(self, through: Through) -> bool:
        """Whether the function has called a model in training, or was tried less than `TRIES` times."""
        return self._in_vain.get(id(_code(through)), (None, 0))[1] < TRIES

    def learn(self, through: Through) -> None:
        """The transform has run."""
        code = _code(through)
        often = 0 if through.trains else self._in_vain.get(id(code), (None, 0))[1] + 1
        self._in_vain[id(code)] = code, often


def _code(through: Through) -> Any:
    function = through.user_function
    return getattr(function, "__code__", type(function))


class TransformListener(Protocol):
    """Receives the calls of ``torch.func`` for a scope; it runs ``proceed`` and returns what that returned."""

    def transformed(self, through: Through, proceed: Callable[[], Any]) -> Any:
        """A transform runs, none around it."""

    def lends(self, module: nn.Module, through: Through, proceed: Callable[[], Any]) -> Any:
        """A module is called with other weights, outside of transforms."""


_listeners: Listeners[TransformListener] = Listeners()
_originals: list[tuple[Any, str, Any]] = []


class _Here(threading.local):
    exchanges: tuple[Exchange, ...] = ()  #: of a thread, one inside the other


_here = _Here()


def join(listener: TransformListener, home: HomeThread) -> None:
    """Starts telling ``listener`` of what its thread calls."""
    with changing:
        if not _listeners:
            _install()
        _listeners.join(listener, home)


def leave(listener: TransformListener) -> None:
    """Stops telling ``listener``; nothing of AMPscope is left in torch after the last one."""
    with changing:
        while _listeners.leave(listener) and _originals:
            home, name, original = _originals.pop()
            if getattr(getattr(home, name), "ampscope_heard", False):  # not where somebody has put something around it
                setattr(home, name, original)


def _install() -> None:
    for transform in transforms.transforms():
        heard = _with_pullback if transform.name == transforms.PULLBACK else _heard
        _put(transform.home, transform.name, heard(transform, getattr(transform.home, transform.name)))
    if (home := transforms.functional_home()) is not None:
        _put(*home, _lending(getattr(*home)))


def _put(home: Any, name: str, ours: Any) -> None:
    ours.ampscope_heard = True
    _originals.append((home, name, getattr(home, name)))
    setattr(home, name, ours)


def _heard(transform: Transform, original: Callable[..., Any]) -> Callable[..., Any]:
    """A transform that says that it runs."""

    @wraps(original)
    def heard(*args: Any, **kwargs: Any) -> Any:
        if torch_private.is_tracing():
            return original(*args, **kwargs)
        return _told(Through(original, args, kwargs, transform.inputs))

    return heard


def _with_pullback(transform: Transform, original: Callable[..., Any]) -> Callable[..., Any]:
    """``vjp``, whose result holds a function that is a call of its own."""
    heard = _heard(transform, original)

    @wraps(original)
    def with_pullback(*args: Any, **kwargs: Any) -> Any:
        if torch_private.is_tracing():
            return original(*args, **kwargs)
        result = heard(*args, **kwargs)
        pullback = Pullback(original, args, kwargs, result[1], transform.inputs)
        return (result[0], pullback, *result[2:])

    return with_pullback


class Pullback:
    """Wraps the function that ``vjp`` returns. Run again, it begins with the forward that it belongs to."""

    def __init__(self, vjp: Any, args: tuple[Any, ...], kwargs: dict[str, Any], real: Any, inputs: slice) -> None:
        self._vjp, self._args, self._kwargs, self._inputs = vjp, args, kwargs, inputs
        self._real = real

    def __call__(self, *cotangents: Any, **options: Any) -> Any:
        """The product of the transposed Jacobian with ``cotangents``."""
        if torch_private.is_tracing():
            return self._real(*cotangents, **options)
        if torch_private.in_functorch():
            return self._inside(cotangents, options)
        args = (self._args, self._kwargs, cotangents, options)
        return _told(Through(self._again, args, {}, slice(0, 3)), lambda: self._real(*cotangents, **options))

    def _inside(self, cotangents: Any, options: Any) -> Any:
        """Within another transform, which is run again as a whole."""
        args, kwargs = _behind_door(self._args), _behind_door(self._kwargs)
        again = bool(_here.exchanges) and _here.exchanges[-1].again
        return self._again(args, kwargs, cotangents, options) if again else self._real(*cotangents, **options)

    def _again(self, args: Any, kwargs: Any, cotangents: Any, options: Any) -> Any:
        return self._vjp(*args, **kwargs)[1](*cotangents, **options)


def _lending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that calls a module with other weights, so that listeners are told."""

    @wraps(original)
    def lending(module: nn.Module, weights: Any, *args: Any, **kwargs: Any) -> Any:
        if torch_private.is_tracing():
            return original(module, weights, *args, **kwargs)
        if torch_private.in_functorch():
            return original(module, _behind_door(weights), *args, **kwargs)
        through = Through(original, (module, weights, *args), kwargs, slice(2, 3), weights)
        run = partial(_lent, module, through)
        return guard.through(run, lambda: original(module, weights, *args, **kwargs), (), {})

    return lending


def _lent(module: nn.Module, through: Through, call: Callable[[], Any], *_: Any) -> Any:
    for listener in _listeners:
        call = _lent_through(listener, module, through, call)
    return call()


def _lent_through(
    listener: TransformListener, module: nn.Module, through: Through, call: Callable[[], Any]
) -> Callable[[], Any]:
    return lambda: listener.lends(module, through, call)


def _told(through: Through, run: Callable[[], Any] | None = None) -> Any:
    if torch_private.in_functorch():
        return through.call(*_behind_door(through.args), **_behind_door(through.kwargs))
    call = run or (lambda: through.call(*through.args, **through.kwargs))
    return guard.through(partial(_chained, through), call, (), {})


def _chained(through: Through, call: Callable[[], Any], *_: Any) -> Any:
    for listener in _listeners:
        call = _through(listener, through, call)
    return call()


def _through(listener: TransformListener, through: Through, call: Callable[[], Any]) -> Callable[[], Any]:
    own = replace(through)  # what a scope learns of the call is its own affair
    return lambda: listener.transformed(own, call)


# -- what a transform reads besides its arguments -----------------------------------------------------------------


def reading(through: Through, proceed: Callable[[], Any]) -> Callable[[], Any]:
    """``proceed``, with what it reads shown to whoever asked for it as the call began."""

    def run() -> Any:
        if through.reads is None:
            return proceed()
        with exchanging(Exchange(through.reads, again=False, inside=through.inside)):
            return proceed()

    return run


@contextlib.contextmanager
def exchanging(exchange: Exchange) -> Iterator[None]:
    """In the body, what transforms read from outside goes through ``exchange``: the tensors that are none of theirs."""
    mode = _Reading(exchange)
    torch_private.insert_function_mode(mode)
    _here.exchanges = (*_here.exchanges, exchange)
    try:
        yield
    finally:
        _here.exchanges = _here.exchanges[:-1]
        guard.surely(partial(torch_private.remove_function_mode, mode))


def _behind_door(value: Any) -> Any:
    """Exchanges outside tensors as `_exchanged` does, behind a door; returns the value as it is where that fails."""
    return (guard.tell(_exchanged, value) or value) if _here.exchanges else value


def _exchanged(value: Any) -> Any:
    """Exchanges the outside tensors in a value that is handed to a transform inside another one."""
    return tensor_tree.rebuild(value, _here.exchanges[-1].of)


def _is_single(value: Any) -> bool:
    """Whether this is one value of a transform's own, as a loss is."""
    return isinstance(value, Tensor) and value.dim() == 0 and transforms.is_wrapped(value)


def _outside(factor: Any) -> Any:
    """Returns the outside tensor for its wrapper inside a transform; None where it is differentiated there."""
    if not isinstance(factor, Tensor) or not transforms.is_wrapped(factor):
        return factor
    return None if factor.requires_grad else transforms.unwrapped(factor)


class _Reading(TorchFunctionMode):
    """Sees the operands of the functions that a transform calls."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange.of
        self._inside = exchange.inside
        self._types = call_state.device_types()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            args, kwargs = self._noted(func, args, kwargs)
        except BaseException as error:  # noqa: BLE001  # a door
            guard.left(error)
        return func(*args, **kwargs)

    def _noted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the arguments that a function gets in place of its own."""
        if self._inside is not None:
            self._look(self._inside, getattr(func, "__name__", ""), args)
        if func is torch.autograd.grad or func is torch.autograd.backward:
            return args, kwargs
        return tuple([self._read(value) for value in args]), {name: self._read(kwargs[name]) for name in kwargs}

    def _look(self, inside: InsideTransform, name: str, args: Any) -> None:
        if len(args) == 2 and name in _PRODUCTS:
            inside.factors += [_outside(each) for each, other in (args, args[::-1]) if _is_single(other)]
        inside.half = inside.half or call_state.ambient_now(self._types).autocast_dtype is torch.float16

    def _read(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if transforms.is_wrapped(value) else self._exchange(value)
        if type(value) in (list, tuple):
            return type(value)([self._read(each) for each in value])
        return value
