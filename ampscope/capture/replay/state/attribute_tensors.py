"""The tensors that modules keep in plain attributes, and in what these hold: hidden states, caches, running means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.replay.state import ownership
from ampscope.capture.replay.state.copies import StateCopies
from ampscope.capture.replay.state.ownership import Treatment
from ampscope.capture.replay.state.put_back import PutBack
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import container_kind, is_plain_object

#: Looks after which the modules are searched anew; early on, and where their layers are others, too.
SEARCH_EVERY = 50
#: Containers inside each other that are looked into.
_DEPTH = 4
#: Objects that one attribute holds at most, for its tensors to be followed: they are looked through around each step.
_MOST = 256
#: Keys of a mapping that are told as they are; any other may take long to put into words, or wait for a device.
_TOLD = (str, int, float, bool, bytes, type(None))
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
        for key, value in list(vars(module).items()):
            if key in _OF_TORCH or issubclass(type(value), _ATOMS):
                continue
            if id(value) not in known:
                known[id(value)] = _holds_state(value)
            if known[id(value)]:
                yield Attribute(module, key, ".".join(filter(None, (self._models.names[id(module)], key))))

    def now(self) -> list[AttributeTensor]:
        """The tensors, as the modules hold them now."""
        return [each for held in self._found for each in _tensors(held.name, vars(held.module).get(held.key))]

    def held_directly(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yields the tensors that are themselves an attribute, each with its module and the attribute's name."""
        for each in self._found:
            value = vars(each.module).get(each.key)
            if type(value) is Tensor and value.is_floating_point() and not value.requires_grad:
                yield each.module, each.key, value

    def keep(self, attributes: list[tuple[nn.Module, dict[str, Any]]]) -> None:
        """Puts copies of what holds tensors into ``attributes``, for the step may change what is in it."""
        of, copies = {id(module): held for module, held in attributes}, StateCopies(lambda tensor: tensor, PutBack())
        for each in self._found:
            held = of.get(id(each.module), {})
            if each.key in held:
                with Suppressed():  # what cannot be copied stays what it is, and a replay says so
                    held[each.key] = copies.of(held[each.key])


def _holds_state(value: Any) -> bool:
    """Whether it is a tensor, or what holds some, and not much else, without driving the training."""
    if issubclass(type(value), Tensor):
        return True
    walk = _Walk()
    with Suppressed() as suppressed:  # nobody knows what an object of the user's does when it is looked at
        tensors = list(walk.tensors("", value, _DEPTH))
        holds = bool(tensors) and not walk.is_cut and ownership.judged(value).treatment is Treatment.COPIED
    return suppressed.error is None and holds


def _tensors(name: str, value: Any) -> list[AttributeTensor]:
    """The tensors with floating values in what is called ``name``, each once."""
    with Suppressed():
        return [
            AttributeTensor(each, tensor, name, tensor is not value)
            for each, tensor in _Walk().tensors(name, value, _DEPTH)
            if type(tensor) is Tensor and tensor.is_floating_point() and not tensor.requires_grad
        ]
    return []


class _Walk:
    """One walk through what an attribute holds: every object once, and not without end; no code of the user's runs.

    Attributes:
        is_cut: Whether there was too much to see.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._entered: set[int] = set()

    def tensors(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors in ``value``, with their names."""
        if issubclass(type(value), _ATOMS) or id(value) in self._entered:
            return
        self._entered.add(id(value))
        if issubclass(type(value), Tensor):
            yield name, value
        elif depth:
            items = _items(value, _MOST - len(self._entered))
            self.is_cut = self.is_cut or items is None
            for label, item in items or ():
                yield from self.tensors(name + label, item, depth - 1)


def _items(value: Any, most: int) -> list[tuple[str, Any]] | None:
    """Lists what a container or a plain object holds, each with what follows its name there; None if it is too much.

    It is read at once, for other threads may change it.
    """
    kind = tuple if issubclass(type(value), tuple) else container_kind(value)
    if kind is None:
        fields = list(vars(value).items()) if is_plain_object(value) else []
        return [(f".{key}", item) for key, item in fields] if len(fields) <= most else None
    if kind.__len__(value) > most:
        return None
    if issubclass(kind, dict):
        return [(f"[{_told(key, place)}]", item) for place, (key, item) in enumerate(list(dict.items(value)))]
    return [(f"[{place}]", item) for place, item in enumerate(list(kind.__iter__(value)))]


def _told(key: Any, place: int) -> str:
    return repr(key) if type(key) in _TOLD else f"{type(key).__name__} {place}"
