"""The tensors inside whatever a model takes or returns are found, cast and replaced here.

No code of the user's runs in it: what is copied is copied by what it consists of, never by its own idea of a copy. A
tensor subclass without memory of its own, which wraps others (a quantised weight and its scale), is a tree too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.trace.dtypes import HALF_DTYPES

#: Plain values, which hold no others.
ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.Size)
_PLAIN_TENSORS = (Tensor, nn.Parameter)
#: What holds nothing that is looked for.
LEAVES = (*ATOMS, Tensor)
_INT = frozenset({int})
_SEQUENCES = (tuple, list, set, frozenset, deque)
#: Python's containers that can change; of two that fit, the first.
_CONTAINER_KINDS = (OrderedDict, defaultdict, dict, list, set, deque)
#: Packages whose classes are more than their attributes.
_NOT_PLAIN = frozenset({"torch", "logging", "threading", "weakref", "io", "functools"})
#: Classes of Python's own whose instances consist of their attributes.
_PLAIN_NATIVES = (object, types.SimpleNamespace)
#: In ``__flags__``: made at run time (``Py_TPFLAGS_HEAPTYPE``), and not to be changed (``Py_TPFLAGS_IMMUTABLETYPE``);
#: a class that is written in Python has the first without the second.
_MADE, _FIXED = 1 << 9, 1 << 8
_DEPTH = 6
#: Objects looked at in one walk; a batch that refers to its whole data set is not followed into it.
_MOST = 4000


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``: through tuples, lists, dicts, dataclasses and plain objects, in a stable order."""
    if isinstance(value, Tensor):
        return iter((value,))
    return iter(()) if isinstance(value, ATOMS) else _Walk().tensors(value, _DEPTH)


def rebuild(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """``value`` with every leaf of type ``kind`` replaced by ``change(leaf)``; containers are copied, never edited."""
    return _Rebuilding(change, kind).of(value, _DEPTH)


def is_shape(value: Any) -> bool:
    """Whether a value is a tuple of whole numbers."""
    return type(value) is tuple and _INT.issuperset(map(type, value))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory in which a wrapper of the user's keeps its values; none for any other tensor.

    No code of the wrapper's class runs: an op on the wrapper itself would be what that class makes of it.
    """
    if not _is_wrapper(tensor):
        return []
    held = list(tensors(dict(vars(tensor))))
    return [each for one in held for each in (inner_tensors(one) or [one])]


def rewrapped(tensor: Tensor, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """A wrapper like ``tensor`` around other tensors; it has no history and needs no gradient.

    Args:
        tensor: A wrapper that has `inner_tensors`.
        change: Gives the tensor that takes the place of an inner one.
        dtype: That the wrapper claims; None for that of ``tensor``.
    """

    def changed(held: Tensor) -> Tensor:
        return rewrapped(held, change, dtype) if _is_wrapper(held) else change(held)

    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        again: Tensor = Tensor._make_wrapper_subclass(  # what torch's notes have every such class call
            type(tensor),
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=dtype or tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
        )
    again.__dict__.update(rebuild(dict(vars(tensor)), changed))
    return again


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a class of the user's answers every op on a tensor, which has no memory but that of what it holds."""
    kind: Any = type(tensor)
    if kind in _PLAIN_TENSORS or kind.__module__.partition(".")[0] == "torch":
        return False
    if kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        has_memory = tensor.layout is torch.strided and tensor.data_ptr() != 0
    return not has_memory and any(True for _ in tensors(dict(vars(tensor))))


def is_plain_object(value: Any) -> bool:
    """Whether ``value`` is nothing but its attributes: an instance of classes that a program wrote in Python.

    What derives from a class of torch's is a thing of torch's (an optimizer, a data loader), whoever wrote it.
    """
    return _is_plain(type(value)) and not callable(value) and hasattr(value, "__dict__")


def container_kind(value: Any) -> Any:
    """Returns the mutable Python container type that ``value`` is of, or derives from; None for anything else."""
    return next((kind for kind in _CONTAINER_KINDS if issubclass(type(value), kind)), None)


def plain_copy(value: Any) -> Any:
    """A shallow copy of a container or a plain object, made without running any code of its class."""
    kind = container_kind(value)
    copied = (kind or _native(type(value))).__new__(type(value))
    _fill(copied, value, kind)
    for home in type(value).__mro__:
        for slot in vars(home).values():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing was assigned to it
                    slot.__set__(copied, slot.__get__(value))
    if hasattr(value, "__dict__"):
        vars(copied).update(vars(value))
    return copied


def _fill(copied: Any, value: Any, kind: Any) -> None:
    """Gives the copy of a container of this ``kind`` what the container holds."""
    if kind is deque:
        deque.__init__(copied, deque.__iter__(value), value.maxlen)
    elif kind is list:
        list.extend(copied, list.__iter__(value))
    elif kind is set:
        set.update(copied, set.__iter__(value))
    elif kind is not None:
        for key, item in list(dict.items(value)):  # other threads may change it
            kind.__setitem__(copied, key, item)
    if kind is defaultdict:
        copied.default_factory = value.default_factory


def _native(kind: type) -> Any:
    """The class of Python's own that ``kind`` is built upon."""
    return next(base for base in kind.__mro__ if base.__flags__ & (_MADE | _FIXED) != _MADE)


def _is_plain(kind: type) -> bool:
    """Whether instances of ``kind`` are made of nothing but attributes."""
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return _native(kind) in _PLAIN_NATIVES and not homes & _NOT_PLAIN


def _opaque_fields(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object that may hold tensors (a batch class, a cache); None for anything else."""
    if isinstance(value, (nn.Module, type)) or callable(value):
        return None
    if not _is_plain(type(value)):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    fields = getattr(value, "__dict__", None)
    return fields if isinstance(fields, dict) else None


def _items(value: Any) -> Iterator[Any] | None:
    """Iterates over a container's items in order; None for anything else."""
    if isinstance(value, Mapping):
        return iter(value.values())
    if isinstance(value, _SEQUENCES):
        return iter(value)
    fields = _opaque_fields(value)
    return iter(list(fields.values())) if fields is not None else None


class _Walk:
    """One walk: every object once, and not without end."""

    def __init__(self) -> None:
        self._entered: dict[int, Any] = {}  # kept, so that an id stays that of its object
        self._left = _MOST

    def tensors(self, value: Any, depth: int) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif depth and self._enters(value):
            for item in _items(value) or ():
                self._left -= 1
                if self._left < 0:
                    return
                yield from self.tensors(item, depth - 1)

    def _enters(self, value: Any) -> bool:
        if isinstance(value, ATOMS) or id(value) in self._entered:
            return False
        self._entered[id(value)] = value
        return True


class _Rebuilding:
    """One rebuilding: a shared container stays shared."""

    def __init__(self, change: Callable[[Any], Any], kind: type) -> None:
        self._change = change
        self._kind = kind
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []
        self._left = _MOST

    def of(self, value: Any, depth: int) -> Any:
        if isinstance(value, self._kind):
            return self._change(value)
        self._left -= 1
        if not depth or self._left < 0 or isinstance(value, LEAVES):
            return value
        if id(value) not in self._made:
            self._originals.append(value)  # kept, so that an id stays that of its object
            self._made[id(value)] = value  # what refers to itself refers to the original
            self._made[id(value)] = self._copy(value, depth - 1)
        return self._made[id(value)]

    def _copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, _SEQUENCES):
            return self._sequence(value, depth)
        if isinstance(value, dict):
            return self._dict(value, depth)
        fields = _opaque_fields(value)
        if fields is None:
            return value
        changed = {name: self.of(item, depth) for name, item in fields.items()}
        if all(changed[name] is item for name, item in fields.items()):
            return value
        copied = plain_copy(value)
        for name, item in changed.items():
            object.__setattr__(copied, name, item)
        return copied

    def _sequence(self, value: Any, depth: int) -> Any:
        items = [self.of(item, depth) for item in value]
        if isinstance(value, tuple):
            if type(value).__module__ == "torch.return_types":
                return type(value)(items)
            return tuple.__new__(type(value), items)  # a named tuple's own constructor may look at its fields
        return type(value)(items) if type(value) in (list, set, frozenset, deque) else items

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        items = {key: self.of(item, depth) for key, item in value.items()}
        if type(value) is dict:
            return items
        copied, kind = plain_copy(value), container_kind(value)
        for key, item in items.items():
            kind.__setitem__(copied, key, item)
        for name in vars(copied).keys() & items.keys() if hasattr(copied, "__dict__") else ():
            vars(copied)[name] = items[name]  # a model output: a dict and a dataclass at once
        return copied


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float16`` for ``float16``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


#: The half-precision dtypes.
HALF = frozenset(map(torch_dtype, HALF_DTYPES))


def cast(value: Any, change: Callable[[Tensor], Tensor], dtypes: Container[torch.dtype]) -> Any:
    """``value`` with its tensors of some dtypes cast; itself where it holds none, so that edits to it last."""
    if isinstance(value, Tensor):
        return change(value) if value.dtype in dtypes else value
    if not holds(value, dtypes):
        return value
    if isinstance(value, tuple):
        items = [cast(item, change, dtypes) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [cast(item, change, dtypes) for item in value]
    if type(value) is dict:
        return {key: cast(item, change, dtypes) for key, item in value.items()}
    return _cast_fields(value, change, dtypes)


def _cast_fields(value: Any, change: Callable[[Tensor], Tensor], dtypes: Container[torch.dtype]) -> Any:
    """A dataclass, or a dict of a class of its own (both at once, as outputs of transformers), with tensors cast."""
    copied = copy.copy(value)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, cast(getattr(value, field.name), change, dtypes))
    if isinstance(value, dict):
        for key, item in value.items():
            dict.__setitem__(copied, key, cast(item, change, dtypes))
    return copied


def holds(value: Any, dtypes: Container[torch.dtype]) -> bool:
    """Whether any tensor in what a call takes or returns is in one of some dtypes."""
    if isinstance(value, Tensor):
        return value.dtype in dtypes
    if isinstance(value, (tuple, list)):
        return any(holds(item, dtypes) for item in value)
    if isinstance(value, dict):
        return any(holds(item, dtypes) for item in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds(getattr(value, field.name), dtypes) for field in dataclasses.fields(value))
    return False
