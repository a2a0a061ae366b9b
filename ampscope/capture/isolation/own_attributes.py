"""In one thread alone, modules have other attributes while a step runs again; others see the live ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import plain_copy
from ampscope.capture.torch_support.threads import changing, origin, whatever_comes

_plain_read, _plain_write = object.__getattribute__, object.__setattr__
#: By thread: what holds the attributes of modules that have others there, by ``id`` of the module.
_instead: dict[int, dict[int, nn.Module]] = {}
_originals: dict[str, Any] = {}  #: of what `nn.Module` defines itself, while ours stands for it


def _read(module: nn.Module, name: str) -> Any:
    mine = _instead.get(get_ident())
    if mine is None or (holder := mine.get(id(module))) is None:
        return super(nn.Module, module).__getattribute__(name)
    value = _plain_read(holder, name)
    if type(value) is MethodType and value.__self__ is holder:
        return MethodType(value.__func__, module)
    return value


def _holder(module: nn.Module) -> nn.Module:
    return _instead.get(get_ident(), {}).get(id(module), module)


def _write(module: nn.Module, name: str, value: Any) -> None:
    _originals["__setattr__"](_holder(module), name, value)


def _delete(module: nn.Module, name: str) -> None:
    _originals["__delattr__"](_holder(module), name)


_OURS: dict[str, Callable[..., Any]] = {"__getattribute__": _read, "__setattr__": _write, "__delattr__": _delete}


def give(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Gives a module, kept alive by the caller, these attributes in this thread, in the body of `own_attributes`."""
    kind = type(module)
    is_plain = kind.__basicsize__ == nn.Module.__basicsize__
    holder: nn.Module = object.__new__(kind) if is_plain else plain_copy(module)
    _plain_write(holder, "__dict__", attributes)
    _instead[get_ident()][id(module)] = holder


@contextlib.contextmanager
def own_attributes() -> Iterator[None]:
    """Lets modules be given attributes that this thread alone meets, until the end of the body.

    It may be entered again inside itself, for less: each class of modules hears of the first time.
    """
    here = get_ident()
    before = _instead.get(here)
    try:
        _instead[here] = dict(before or {})
        _settle()
        yield
    finally:
        whatever_comes(partial(_go_back, here, before))


def _go_back(here: int, before: dict[int, nn.Module] | None) -> None:
    if before is None:
        _instead.pop(here, None)
    else:
        _instead[here] = before
    _settle()


def _settle() -> None:
    """Ours stand for what `nn.Module` defines as long as any thread needs them; safe to call twice."""
    with changing:
        for name, ours in _OURS.items():
            now = vars(nn.Module).get(name)
            if _instead and now is not ours:
                _originals[name] = now
                setattr(nn.Module, name, ours)
            elif not _instead and now is ours and _originals[name] is not None:
                setattr(nn.Module, name, _originals[name])
            elif not _instead and now is ours:
                delattr(nn.Module, name)


@contextlib.contextmanager
def left_as_found(known: Collection[int], unseen: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Gives every module that runs in the body, and whose ``id`` is not ``known``, attributes of its own there.

    A teacher kept in a list, a layer kept in a closure: nobody knows their state at the start of the step. So they run
    on copies of what they hold now; whether that gives the same shows in what they return.

    Args:
        known: The modules that a replay runs on substitutes.
        unseen: Keeps the copying out of what is observed.
    """
    here = origin()
    found: dict[int, nn.Module] = {}
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that its ``id`` stays its

    def copied(value: Any) -> Any:
        if not issubclass(type(value), Tensor) or not value.is_leaf or value.requires_grad:
            return value
        if id(value) not in copies:
            copies[id(value)] = value, value.detach().clone()
        return copies[id(value)][1]

    def look(module: nn.Module, _: Any) -> None:
        if id(module) not in known and origin() == here and id(module) not in found:
            found[id(module)] = module
            with unseen():
                held = {name: copied(value) for name, value in vars(module).copy().items()}
                held["_buffers"] = {name: copied(buffer) for name, buffer in held["_buffers"].items()}
            give(module, held)

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


#: Homes and names of classes, and those of their methods that tell the trainer.
_TELLING = (
    ("lightning.pytorch.core.module", "LightningModule", ("log", "log_dict", "print")),
    ("pytorch_lightning.core.module", "LightningModule", ("log", "log_dict", "print")),
)


def silenced(module: nn.Module) -> dict[str, Callable[..., None]]:
    """Attributes that make ``module`` tell its trainer nothing; most modules have no need of any."""
    return {name: _say_nothing for kind, names in _telling_kinds() if isinstance(module, kind) for name in names}


def _telling_kinds() -> Iterator[tuple[type, tuple[str, ...]]]:
    for home, name, methods in _TELLING:
        kind = getattr(sys.modules.get(home), name, None)
        if isinstance(kind, type):
            yield kind, methods


def _say_nothing(*_: Any, **__: Any) -> None:
    """Stands in the place of a method that tells the trainer something."""


@contextlib.contextmanager
def gradients_kept(models: Models) -> Iterator[None]:
    """Puts back every ``.grad`` in case a module holds a parameter where no substitute reaches it."""
    kept = [(parameter, parameter.grad) for _, parameter in models.parameters.values()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
