"""The tensors that modules keep in plain attributes, and in what these hold: hidden states, caches, running means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.replay.state import ownership
from ampscope.capture.replay.state.copies import StateCopies
from ampscope.capture.replay.state.ownership import Treatment
from ampscope.capture.replay.state.put_back import PutBack
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import container_kind, is_plain_object

#: Looks after which the modules are searched anew; early on, and where their layers are others, too.
SEARCH_EVERY = 50
#: Containers inside each other that are looked into.
_DEPTH = 4
#: Tensors in one attribute that are followed.
_MOST = 64
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.Size, torch.dtype, torch.device, nn.Module)
#: What every module has.
_OF_TORCH = frozenset(vars(nn.Module()))


class Attribute(NamedTuple):
    """A plain attribute of a module that holds a tensor, or what holds some."""

    module: nn.Module
    key: str
    name: str  #: with the module's qualified name


class AttributeTensor(NamedTuple):
    """A tensor in a plain attribute."""

    name: str  #: ``cell.hidden``, ``cell.cache['keys']``
    tensor: Tensor
    attribute: str  #: ``cell.cache``
    is_nested: bool  #: it lies in what the attribute holds


class AttributeTensors:
    """Finds the plain attributes of the watched modules that hold tensors.

    Args:
        models: The watched models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._found: list[Attribute] = []
        self._looks = 0
        self._revision = -1  # of the models at the latest search

    def __bool__(self) -> bool:
        return bool(self._found)

    def search(self) -> None:
        """Searches the modules again, if it is time; what a step puts there is found around the next steps."""
        looks, self._looks = self._looks, self._looks + 1
        is_early = looks < SEARCH_EVERY and not looks & (looks - 1)
        if is_early or looks % SEARCH_EVERY == 0 or self._revision != self._models.revision:
            self._revision = self._models.revision
            known: dict[int, bool] = {}  # a configuration that many modules share is looked through once
            self._found = [each for module in self._models.modules for each in self._holding(module, known)]

    def _holding(self, module: nn.Module, known: dict[int, bool]) -> Iterator[Attribute]:
        for key, value in vars(module).items():
            if key in _OF_TORCH or isinstance(value, _ATOMS):
                continue
            if id(value) not in known:
                known[id(value)] = _holds_state(value)
            if known[id(value)]:
                yield Attribute(module, key, ".".join(filter(None, (self._models.names[id(module)], key))))

    def now(self) -> list[AttributeTensor]:
        """The tensors, as the modules hold them now."""
        return [each for held in self._found for each in _tensors(held.name, vars(held.module).get(held.key))]

    def at(self, attributes: list[tuple[nn.Module, dict[str, Any]]]) -> list[AttributeTensor]:
        """The tensors that were in ``attributes``, by module."""
        of = {id(module): held for module, held in attributes}
        values = ((each.name, of.get(id(each.module), {}).get(each.key)) for each in self._found)
        return [each for name, value in values for each in _tensors(name, value)]

    def keep(self, attributes: list[tuple[nn.Module, dict[str, Any]]]) -> None:
        """Puts copies of what holds tensors into ``attributes``, for the step may change what is in it."""
        of, copies = {id(module): held for module, held in attributes}, StateCopies(lambda tensor: tensor, PutBack())
        for each in self._found:
            held = of.get(id(each.module), {})
            if each.key in held:
                held[each.key] = copies.of(held[each.key])


def _holds_state(value: Any) -> bool:
    """Whether it is a tensor, or what holds one without driving the training."""
    if isinstance(value, Tensor):
        return True
    if container_kind(value) is None and not isinstance(value, tuple) and not is_plain_object(value):
        return False
    return ownership.judged(value).treatment is Treatment.COPIED


def _tensors(name: str, value: Any) -> list[AttributeTensor]:
    """The tensors with floating values in what is called ``name``, each once."""
    found: dict[int, AttributeTensor] = {}
    for each, tensor in _walk(name, value, _DEPTH):
        if len(found) == _MOST:
            break
        if type(tensor) is Tensor and tensor.is_floating_point() and not tensor.requires_grad:
            found.setdefault(id(tensor), AttributeTensor(each, tensor, name, tensor is not value))
    return list(found.values())


def _walk(name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth and not isinstance(value, _ATOMS):
        for inner, item in _items(name, value):
            yield from _walk(inner, item, depth - 1)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (tuple, list)) or container_kind(value) is not None:
        yield from ((f"{name}[{place}]", item) for place, item in enumerate(list(value)))
    elif is_plain_object(value):
        yield from ((f"{name}.{key}", item) for key, item in list(vars(value).items()))
