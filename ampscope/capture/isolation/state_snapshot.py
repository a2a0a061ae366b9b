"""A snapshot keeps what a forward may change as it was when the step began: buffers, tensors in attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.isolation import state_copies
from ampscope.capture.isolation.state_copies import PutBack, StateCopies, Treatment
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.models import Models, held_buffers
from ampscope.capture.torch_support.tensor_tree import container_kind, inner_tensors, is_plain_object
from ampscope.capture.torch_support.torch_private import version_counter

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
        holds = bool(tensors) and not walk.is_cut and state_copies.judged(value).treatment is Treatment.COPIED
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


#: Steps after which the list of tensors that a forward may change is drawn up anew.
REVIEW_EVERY = 50
#: Buffers above this size are copied every step only once they have changed.
SMALL_BUFFER_BYTES = 1 << 20

_Named = dict[tuple[int, str], Tensor]  # buffers by ``id`` of their module and by name


class StateSnapshot:
    """Keeps what a forward may change, as it was at the start of the step.

    These are buffers (BatchNorm statistics, moving averages), tensors in plain attributes, frozen parameters, and the
    modules' attributes themselves (counters, hidden states).

    Args:
        models: The watched models.

        keeps_before: Also as it was at the start of the step before: for who wants back what has been poisoned since.

    Attributes:
        held: Finds what modules keep in plain attributes.
    """

    def __init__(self, models: Models, *, keeps_before: bool = False) -> None:
        self._models = models
        self.keeps_before = keeps_before
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  #: likewise, of the step before
        self._buffers: tuple[_Named, _Named] = {}, {}  # at the start of the step, and of the step before
        self.held = AttributeTensors(models)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  #: id -> tensor, copy
        self._versions: dict[int, int] = {}
        self._changing: set[int] = set()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._candidates: list[Tensor] = []
        self._in_attributes: list[AttributeTensor] = []
        self._replaceable: list[int] = []  # at the last look
        self._revision = -1  # of the models, likewise
        self._taken_at = -1  # revision of the models at the start of the step
        self._steps = 0

    def take(self) -> None:
        """Copies what may change; called at the first forward of a step."""
        copies = [module.__dict__.copy() for module in self._models.modules]
        for attributes in copies:
            attributes["_buffers"] = dict(attributes["_buffers"])
        self._attributes = list(zip(self._models.modules, copies, strict=True))
        self.held.search()
        holds = bool(self.held)
        if holds:
            self.held.keep(self._attributes)
        self._review()
        self._taken_at = self._revision
        self._in_attributes = []
        if not (self._candidates or self._copies or holds or self.keeps_before):
            return
        with torch.no_grad():
            self._in_attributes = self.held.now() if holds else []
            live = [tensor for tensor in (*self._candidates, *self._nested()) if self._may_change(tensor)]
            if self.keeps_before:
                self._before, self._copies = self._copies, self._before
                self._buffers = {(id(each), name): tensor for each, name, tensor in self.statistics()}, self._buffers[0]
            if [id(tensor) for tensor in live] != list(self._copies):
                self._copies = {id(tensor): (tensor, tensor.detach().clone()) for tensor in live}
            elif live:
                torch._foreach_copy_([copied for _, copied in self._copies.values()], live)

    def let_go(self) -> None:
        """Keeps nothing alive that modules held and hold no more; `take` comes before it is asked for again."""
        self._attributes, self._in_attributes = [], []

    def forget(self) -> None:
        """Lets go of the state; `take` comes before it is asked for again."""
        self._copies, self._attributes, self._candidates, self._in_attributes = {}, [], [], []
        self._before, self._buffers = {}, ({}, {})
        self._revision = -1

    def _review(self) -> None:
        """Draws up the list of what may change: every so often, and when it is known to be another."""
        replaceable, revision = self._models.replaceable_tensors(), self._models.revision
        if self._steps % REVIEW_EVERY == 0 or (replaceable, revision) != (self._replaceable, self._revision):
            held = self._models.mutable_tensors()
            self._candidates = [each for tensor in held for each in (inner_tensors(tensor) or [tensor])]
            self._replaceable, self._revision = replaceable, revision
        self._steps += 1

    def _may_change(self, tensor: Tensor) -> bool:
        if tensor.numel() * tensor.element_size() <= SMALL_BUFFER_BYTES:
            return True
        key, now = id(tensor), version_counter(tensor)
        if self._versions.setdefault(key, now) != now:
            self._changing.add(key)
        return key in self._changing

    def at_start(self, tensor: Tensor) -> Tensor | None:
        """A fresh copy of a tensor as it was at the start of the step; None for those that never change."""
        known = self._copies.get(id(tensor))
        return known[1].clone() if known is not None else None

    def statistics(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """The modules' buffers as they are now, and, where they may be wanted back, tensors in plain attributes."""
        yield from held_buffers(self._models.modules)
        yield from self.held.held_directly() if self.keeps_before else ()

    def buffer(self, module: nn.Module, name: str) -> Tensor | None:
        """The tensor that one was at the start of the step; a forward may have put another in its place."""
        return self._buffers[0].get((id(module), name))

    def buffer_before(self, module: nn.Module, name: str) -> Tensor | None:
        """Returns the values of a buffer or attribute at the start of the step before; None where they are not kept."""
        known = self._before.get(id(self._buffers[1].get((id(module), name))))
        return known[1] if known is not None else None

    def restore(self, tensor: Tensor, value: Tensor) -> None:
        """Has the step begin from another value of a tensor; of those that `at_start` gives."""
        self._copies[id(tensor)][1].copy_(value)

    def gap(self) -> str:
        """Says what of the state at the start of the step is not known any more; empty when all is."""
        if self._taken_at != self._models.revision or not self._models.is_current():
            return "a layer or a parameter of the model was replaced within the step"
        listed = set(map(id, self._candidates))
        for tensor in (*self._candidates, *self._nested()):
            if id(tensor) not in self._copies and version_counter(tensor) != self._versions.get(id(tensor)):
                return "a large buffer was changed for the first time, and what it held before was not kept"
        for module, attributes in self._attributes:
            for name, value in attributes.items():
                written = issubclass(type(value), Tensor) and value.is_leaf and version_counter(value) > 0
                if written and id(value) not in listed and not inner_tensors(value):
                    return f"the tensor {name} of {type(module).__name__} was new, and what it held was not kept"
        return ""

    def attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Every module with its attributes as they were at the start of the step."""
        return self._attributes

    def attribute_tensors(self) -> list[AttributeTensor]:
        """The tensors in plain attributes as they were referred to at the start of the step."""
        return self._in_attributes

    def _nested(self) -> Iterator[Tensor]:
        """Yields the tensors in attributes that lie in what an attribute holds, and are none themselves."""
        return (each.tensor for each in self._in_attributes if each.is_nested)
