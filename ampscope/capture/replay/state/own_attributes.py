"""Gives modules other attributes in one thread alone, while it runs a step again; others read and write the live ones.

The modules stay themselves, so whatever refers to one (a closure, a hook, a registry) meets the other attributes, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from types import MethodType
from typing import Any

from torch import nn

from ampscope.capture.torch_support.calls.threads import changing, whatever_comes
from ampscope.capture.torch_support.tensor_tree import plain_copy

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
