"""The state that user code keeps around: a replay works on copies of it, or puts it back."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support.guard import Suppressed

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, collections.deque)
_DEPTH = 5


class StateCopies:
    """Copies containers, generators and plain objects, each once, so that what is shared stays shared.

    Args:
        tensor: Gives the substitute of a tensor.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor]) -> None:
        self._tensor = tensor
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept, so that an id stays that of its object

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """The copy of ``value``; itself where it cannot change.

        Raises:
            Exception: Whatever its own copying raises; there must be no replay then.
        """
        if isinstance(value, _PLAIN) or depth == 0:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) not in self._made:
            self._originals.append(value)
            self._made[id(value)] = value  # what refers to itself refers to the original
            self._made[id(value)] = self._copy(value, depth)
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
        copied = copy.copy(value)
        if isinstance(copied, dict):
            for key, item in value.items():
                dict.__setitem__(copied, key, self.of(item, depth - 1))
        elif isinstance(copied, (list, collections.deque)):
            for index, item in enumerate(value):
                copied[index] = self.of(item, depth - 1)
        return copied

    def _object(self, value: Any, depth: int) -> Any:
        copied = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(copied, name, self.of(item, depth - 1))
        return copied


def _is_plain_object(value: Any) -> bool:
    """Whether ``value`` is an instance of a class of the user's that holds attributes."""
    if isinstance(value, (nn.Module, type, types.ModuleType)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "builtins", "logging", "threading", "weakref")


class FunctionState:
    """State that functions reach outside their arguments: closure cells, globals they name, the object of a method.

    Args:
        functions: The functions that are about to run again.
    """

    def __init__(self, functions: Iterator[Callable[..., Any]]) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._kept: set[int] = set()
        for function in functions:
            self._keep_function(function)

    def put_back(self) -> None:
        """Restores all of it."""
        for undo in reversed(self._undo):
            undo()

    def _keep_function(self, function: Callable[..., Any]) -> None:
        owner = getattr(function, "__self__", None)
        if owner is not None and _is_plain_object(owner):
            self._keep_value(vars(owner))
            for value in list(vars(owner).values()):
                self._keep_value(value)
        plain = getattr(getattr(function, "__func__", function), "func", getattr(function, "__func__", function))
        code = getattr(plain, "__code__", None)
        if code is not None:
            for cell in plain.__closure__ or ():
                with Suppressed():  # a cell may be empty
                    self._keep_cell(cell, cell.cell_contents)
            for name in code.co_names:
                if name in plain.__globals__:
                    self._keep_global(plain.__globals__, name)

    def _keep_cell(self, cell: types.CellType, value: Any) -> None:
        self._undo.append(lambda: setattr(cell, "cell_contents", value))
        self._keep_value(value)

    def _keep_global(self, home: dict[str, Any], name: str) -> None:
        value = home[name]
        if isinstance(value, (*_PLAIN, *_CONTAINERS)):
            self._undo.append(lambda: home.__setitem__(name, value))
        self._keep_value(value)

    def _keep_value(self, value: Any) -> None:
        """Remembers the contents of a container, the state of a generator, the gradient of a leaf."""
        if isinstance(value, _PLAIN) or id(value) in self._kept:
            return
        self._kept.add(id(value))
        if isinstance(value, _CONTAINERS):
            self._undo.append(_refill(value, copy.copy(value)))
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            python = value.getstate()
            self._undo.append(lambda: value.setstate(python))
        elif hasattr(value, "bit_generator"):
            numpy = value.bit_generator.state
            self._undo.append(lambda: setattr(value.bit_generator, "state", numpy))
        elif isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            gradient, value.grad = value.grad, None
            self._undo.append(lambda: setattr(value, "grad", gradient))


def _refill(container: Any, before: Any) -> Callable[[], None]:
    def undo() -> None:
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(before)

    return undo


def functions_of(modules: list[nn.Module]) -> Iterator[Callable[..., Any]]:
    """The forwards of modules and every hook on them."""
    for module in modules:
        yield module.forward
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            yield from getattr(module, name, {}).values()
