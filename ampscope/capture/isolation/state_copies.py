"""A replay computes with copies of the model's state, and puts back what it has to use as it is."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.tensor_tree import container_kind, is_plain_object, plain_copy

#: Objects looked at to find out what one of them is.
_MOST = 4000
_ATOMS = (bool, int, float, complex, str, bytes, type(None), Tensor)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


class Treatment(Enum):
    """The ways in which a replay treats an object."""

    COPIED = auto()
    LEFT_ALONE = auto()
    PUT_BACK = auto()


class Judged(NamedTuple):
    """An object, looked through."""

    treatment: Treatment
    seen: list[Any]  #: the plain objects and containers that it consists of, itself included


def is_generator(value: Any) -> bool:
    """Whether ``value`` draws random numbers: torch's, Python's or NumPy's kind."""
    kind = type(value)
    return issubclass(kind, (torch.Generator, random.Random)) or kind.__module__.startswith("numpy.random")


def judged(value: Any) -> Judged:
    """Looks through a plain object, in breadth, and says what becomes of it."""
    driving, seen, holds_state = _driving_kinds(), {id(value): value}, False
    front = collections.deque([value])
    while front:
        for item in _held(front.popleft()):
            if issubclass(type(item), driving):
                return Judged(Treatment.LEFT_ALONE, [])
            holds_state = holds_state or issubclass(type(item), Tensor) or is_generator(item)
            if id(item) not in seen and _can_be_entered(item):
                if len(seen) == _MOST:
                    return Judged(Treatment.PUT_BACK, list(seen.values()))
                seen[id(item)] = item
                front.append(item)
    return Judged(Treatment.COPIED if holds_state else Treatment.PUT_BACK, list(seen.values()))


def _driving_kinds() -> tuple[type, ...]:
    kinds: list[type] = [torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler]
    kinds.append(torch.utils.data.DataLoader)
    if torch.distributed.is_available():
        kinds.append(torch.distributed.ProcessGroup)
    return tuple(kinds)


def _can_be_entered(item: Any) -> bool:
    return not issubclass(type(item), _ATOMS) and (issubclass(type(item), _CONTAINERS) or is_plain_object(item))


def _held(value: Any) -> list[Any]:
    """Lists what a container or a plain object holds, read at once, for other threads may change it."""
    kind = next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)
    if kind is None:
        return list(vars(value).values())
    return list(dict.values(value) if kind is dict else kind.__iter__(value))


class PutBack:
    """Remembers the contents of containers, the attributes of objects, the states of generators.

    What a replay has not changed is not written to: someone else may be using it.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._kept: dict[int, Any] = {}  # by id; kept, so that an id stays that of its object

    def all(self) -> None:
        """Restores all of it."""
        for undo in reversed(self._undo):
            undo()

    def by(self, undo: Callable[[], Any]) -> None:
        """Has ``undo`` called with the rest."""
        self._undo.append(undo)

    def keep(self, value: Any) -> None:
        """Remembers ``value`` itself, not what it holds in turn; a leaf's gradient goes away until then."""
        if id(value) in self._kept:
            return
        self._kept[id(value)] = value
        if container_kind(value) is not None:
            self._keep_container(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            python = value.getstate()
            self._undo.append(lambda: value.setstate(python))
        elif hasattr(value, "bit_generator"):
            numpy = value.bit_generator.state
            self._undo.append(lambda: setattr(value.bit_generator, "state", numpy))
        elif isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                gradient, value.grad = value.grad, None
                self._undo.append(lambda: setattr(value, "grad", gradient))
        elif is_plain_object(value):
            self._keep_container(vars(value))

    def _keep_container(self, container: Any) -> None:
        kind, before = container_kind(container), _contents(container)

        def undo() -> None:
            now = _contents(container)
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                _refill(kind, container, before)

        self._undo.append(undo)


def _contents(container: Any) -> list[Any]:
    """Everything in a container, in order; of a dict, keys and values in turn."""
    if isinstance(container, dict):
        return [each for pair in dict.items(container) for each in pair]
    return list(container)


def _refill(kind: Any, container: Any, contents: list[Any]) -> None:
    """Fills a container by the methods of the ``kind`` of Python's that it is; never empty, for who else reads it."""
    if issubclass(kind, dict):
        before = dict(zip(contents[::2], contents[1::2], strict=True))
        for key in [key for key in list(dict.keys(container)) if key not in before]:
            kind.__delitem__(container, key)
        for key, value in before.items():
            kind.__setitem__(container, key, value)
        for key, value in before.items() if list(dict.keys(container)) != list(before) else ():
            kind.__delitem__(container, key)
            kind.__setitem__(container, key, value)
    elif kind is set:
        set.intersection_update(container, contents)
        set.update(container, contents)
    elif kind is list:
        list.__setitem__(container, slice(None), contents)
    else:
        kind.clear(container)
        kind.extend(container, contents)


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 5
#: Without items there is nothing to look into; a module has a dozen such for its hooks.
_BUILT_IN: frozenset[type] = frozenset({dict, OrderedDict, list, set})


class StateCopies:
    """Copies containers, generators and objects that hold state, each once, so that what is shared stays shared.

    Args:
        tensor: Gives the substitute of a tensor.
        put_back: Takes what is used as it is.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor], put_back: PutBack) -> None:
        self._tensor = tensor
        self._put_back = put_back
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept, so that an id stays that of its object

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """The copy of ``value``; itself where it cannot change, or is put back or left alone.

        Raises:
            Exception: Whatever its own copying raises; there must be no replay then.
        """
        if issubclass(type(value), _PLAIN) or depth == 0:
            return value
        if issubclass(type(value), Tensor):
            return self._tensor(value)
        if id(value) not in self._made:
            self._originals.append(value)
            if type(value) in _BUILT_IN and not value:
                self._made[id(value)] = type(value)()
            else:
                self._made[id(value)] = value  # what refers to itself refers to the original
                self._made[id(value)] = self._copy(value, depth)
        return self._made[id(value)]

    def _copy(self, value: Any, depth: int) -> Any:
        if issubclass(type(value), torch.Generator):
            return value.clone_state()
        if is_generator(value):
            return copy.deepcopy(value)
        if issubclass(type(value), tuple):
            return self._tuple(value, depth)
        if container_kind(value) is not None:
            return self._container(value, depth)
        return self._object(value, depth) if is_plain_object(value) else value

    def _tuple(self, value: Any, depth: int) -> Any:
        held = list(tuple.__iter__(value))
        items = [self.of(item, depth - 1) for item in held]
        if all(item is before for item, before in zip(items, held, strict=True)):
            return value  # it cannot change, and some, as the time, cannot be made again
        if type(value).__module__ == "torch.return_types":
            return type(value)(items)
        return tuple.__new__(type(value), items)  # a named tuple's own constructor may look at its fields

    def _container(self, value: Any, depth: int) -> Any:
        kind, copied = container_kind(value), plain_copy(value)
        if isinstance(copied, dict):
            for key, item in list(dict.items(copied)):
                kind.__setitem__(copied, key, self.of(item, depth - 1))
        elif kind is not set:
            for index, item in enumerate(list(kind.__iter__(copied))):
                kind.__setitem__(copied, index, self.of(item, depth - 1))
        return copied

    def _object(self, value: Any, depth: int) -> Any:
        treatment, seen = judged(value)
        if treatment is Treatment.COPIED:
            copied = plain_copy(value)
            for name, item in list(vars(copied).items()):
                vars(copied)[name] = self.of(item, depth - 1)
            return copied
        for each in seen:
            self._put_back.keep(each)
        return value


_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


def keep_function_state(functions: Iterator[Callable[..., Any]], put_back: PutBack) -> None:
    """Keeps what functions can change besides their arguments: closure cells, globals, the object of a method.

    Args:
        functions: The functions that are about to run again.
        put_back: Takes it.
    """
    for function in functions:
        owner = getattr(function, "__self__", None)
        if owner is not None and is_plain_object(owner):
            put_back.keep(owner)
            for value in list(vars(owner).values()):
                _keep_value(value, put_back)
        plain = getattr(getattr(function, "__func__", function), "func", getattr(function, "__func__", function))
        code = getattr(plain, "__code__", None)
        if code is not None:
            for cell in plain.__closure__ or ():
                with Suppressed():  # a cell may be empty
                    _keep_cell(cell, cell.cell_contents, put_back)
            for name in code.co_names:
                if name in plain.__globals__:
                    _keep_global(plain.__globals__, name, put_back)


def _keep_cell(cell: types.CellType, value: Any, put_back: PutBack) -> None:
    put_back.by(lambda: setattr(cell, "cell_contents", value))
    _keep_value(value, put_back)


def _keep_global(home: dict[str, Any], name: str, put_back: PutBack) -> None:
    value = home[name]
    if isinstance(value, _IMMUTABLE) or container_kind(value) is not None:
        put_back.by(lambda: home.__setitem__(name, value))
    _keep_value(value, put_back)


def _keep_value(value: Any, put_back: PutBack) -> None:
    if not isinstance(value, _IMMUTABLE):
        put_back.keep(value)


def functions_of(modules: list[nn.Module]) -> Iterator[Callable[..., Any]]:
    """The forwards of modules and every hook on them."""
    for module in modules:
        yield module.forward
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            yield from getattr(module, name, {}).values()
