"""Twins of the state that user code keeps around: a replay works on them, and forgets them."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.guard import Attempt

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, collections.deque)
_DEPTH = 5


class Twins:
    """Copies containers, generators and plain objects, each once, so that what is shared stays shared.

    Args:
        tensor: Gives the stand-in of a tensor.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor]) -> None:
        self._tensor = tensor
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept, so that an id stays that of its object

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """The twin of ``value``; itself where it cannot change (or cannot be copied)."""
        if isinstance(value, _PLAIN) or depth == 0:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) not in self._made:
            attempt = Attempt()
            twin = value
            with attempt:
                twin = self._copy(value, depth)
            self._originals.append(value)
            self._made[id(value)] = value if attempt.error is not None else twin
        return self._made[id(value)]

    def _copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            return copy.deepcopy(value)
        if isinstance(value, tuple):
            return tuple.__new__(type(value), [self.of(item, depth - 1) for item in value])
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth)
        return self._object(value, depth) if _is_plain_object(value) else value

    def _container(self, value: Any, depth: int) -> Any:
        twin = copy.copy(value)
        if isinstance(twin, dict):
            for key, item in value.items():
                dict.__setitem__(twin, key, self.of(item, depth - 1))
        elif isinstance(twin, (list, collections.deque)):
            for index, item in enumerate(value):
                twin[index] = self.of(item, depth - 1)
        return twin

    def _object(self, value: Any, depth: int) -> Any:
        twin = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(twin, name, self.of(item, depth - 1))
        return twin


def _is_plain_object(value: Any) -> bool:
    """Whether ``value`` is an instance of a class of the user's that holds attributes."""
    if isinstance(value, (nn.Module, type, types.ModuleType)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "builtins", "logging", "threading", "weakref")


class Surroundings:
    """State that functions reach outside their arguments: closure cells, globals they name, the object of a method.

    Args:
        functions: The functions that are about to run again.
    """

    def __init__(self, functions: Iterator[Callable[..., Any]]) -> None:
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        for function in functions:
            self._keep(function)

    def _keep(self, function: Callable[..., Any]) -> None:
        plain = getattr(function, "__func__", function)
        plain = getattr(plain, "func", plain)
        code = getattr(plain, "__code__", None)
        if code is None:
            return
        for cell in plain.__closure__ or ():
            with Attempt():  # a cell may be empty
                self._cells.append((cell, cell.cell_contents))
                self._keep_contents(cell.cell_contents)
        for name in code.co_names:
            if name in plain.__globals__ and isinstance(plain.__globals__[name], (*_PLAIN, *_CONTAINERS)):
                self._globals.append((plain.__globals__, name, plain.__globals__[name]))
                self._keep_contents(plain.__globals__[name])
        owner = getattr(function, "__self__", None)
        if owner is not None and _is_plain_object(owner):
            self._keep_contents(vars(owner))
            for value in vars(owner).values():
                self._keep_contents(value)

    def _keep_contents(self, value: Any) -> None:
        if isinstance(value, _CONTAINERS):
            self._contents.setdefault(id(value), (value, copy.copy(value)))
        elif isinstance(value, torch.Generator):
            self._contents.setdefault(id(value), (value, value.get_state()))

    def put_back(self) -> None:
        """Restores all of it."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for home, name, value in self._globals:
            home[name] = value
        for container, before in self._contents.values():
            if isinstance(container, torch.Generator):
                container.set_state(before)
                continue
            container.clear()
            container.update(before) if isinstance(container, (dict, set)) else container.extend(before)


def functions_of(modules: list[nn.Module]) -> Iterator[Callable[..., Any]]:
    """The forwards of modules and every hook on them."""
    for module in modules:
        yield module.forward
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            yield from getattr(module, name, {}).values()
