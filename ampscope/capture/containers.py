"""Walks the tensors inside whatever a model takes or returns, and rebuilds it with others in their place."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type)
_SEQUENCES = (tuple, list, set, frozenset, deque)
_DEPTH = 6


def _opaque_fields(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object that may hold tensors (a batch class, a cache); None for anything else."""
    if isinstance(value, nn.Module) or callable(value) or type(value).__module__.split(".")[0] in ("torch", "builtins"):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    fields = getattr(value, "__dict__", None)
    return fields if isinstance(fields, dict) else None


def tensors(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Every tensor in ``value``: through tuples, lists, dicts, dataclasses and plain objects, in a stable order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _ATOMS) or depth == 0:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item, depth - 1)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            yield from tensors(item, depth - 1)
    elif (fields := _opaque_fields(value)) is not None:
        for item in fields.values():
            yield from tensors(item, depth - 1)


def rebuild(value: Any, change: Callable[[Any], Any], kind: type = Tensor, depth: int = _DEPTH) -> Any:
    """``value`` with every leaf of type ``kind`` replaced by ``change(leaf)``; containers are copied, never edited."""
    if isinstance(value, kind):
        return change(value)
    if depth == 0 or isinstance(value, (*_ATOMS, Tensor)):
        return value
    if isinstance(value, _SEQUENCES):
        return _rebuild_sequence(value, change, kind, depth)
    if isinstance(value, dict):
        return _rebuild_dict(value, change, kind, depth)
    fields = _opaque_fields(value)
    if fields is None or not any(_holds(item, kind, depth - 1) for item in fields.values()):
        return value
    twin = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(twin, name, rebuild(item, change, kind, depth - 1))
    return twin


def _rebuild_sequence(value: Any, change: Callable[[Any], Any], kind: type, depth: int) -> Any:
    items = [rebuild(item, change, kind, depth - 1) for item in value]
    if isinstance(value, tuple):
        return tuple.__new__(type(value), items)  # a named tuple's own constructor may look at its fields
    if type(value) in (list, set, frozenset, deque):
        return type(value)(items)
    return items


def _rebuild_dict(value: dict[Any, Any], change: Callable[[Any], Any], kind: type, depth: int) -> Any:
    items = {key: rebuild(item, change, kind, depth - 1) for key, item in value.items()}
    if type(value) is dict:
        return items
    twin = copy.copy(value)
    if hasattr(twin, "__dataclass_fields__"):  # a model output: a dict and a dataclass at once
        for name, item in items.items():
            setattr(twin, str(name), item)
        return twin
    twin.update(items)
    return twin


def _holds(value: Any, kind: type, depth: int) -> bool:
    if isinstance(value, kind):
        return True
    if isinstance(value, _ATOMS) or depth == 0:
        return False
    if isinstance(value, Mapping):
        return any(_holds(item, kind, depth - 1) for item in value.values())
    if isinstance(value, _SEQUENCES):
        return any(_holds(item, kind, depth - 1) for item in value)
    fields = _opaque_fields(value)
    return fields is not None and any(_holds(item, kind, depth - 1) for item in fields.values())
