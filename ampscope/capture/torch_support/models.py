"""`Models` knows modules and parameters by name, which calls are outermost, and leaves that stand in for parameters."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support import dynamo
from ampscope.capture.torch_support.sharding import class_name, is_fully_sharded, is_sharded, local
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.torch_support.torch_private import past_modes

#: Leaves of one name that are counted among the parameters at a time: twins, and the averages that follow them.
_MOST = 4


class StandIns:
    """Leaves that the loop gives to a model by name, and trains in the place of its parameters (a vmapped ensemble).

    Args:
        parameters: The parameters by ``id``; what stands in for one is added.

    Attributes:
        held: Those that are counted among the parameters, by ``id``.
        allowed: Whether nobody trains the parameters themselves.
    """

    def __init__(self, parameters: dict[int, tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._lent: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self.held: dict[int, tuple[str, Tensor]] = {}
        self.allowed: Callable[[], bool] = lambda: False

    def lend(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """The loop gives these to a model, each under the name of a parameter."""
        if len(self._lent) > _MOST * len(self._parameters):
            self._lent = {key: known for key, known in self._lent.items() if known[1]() is not None}
        for name, tensor in given:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._parameters:
                self._lent[id(tensor)] = name, weakref.ref(tensor)

    def take_up(self, trained: Iterable[Tensor] | None = None) -> bool:
        """Counts leaves that were lent among the parameters, where nobody trains the parameters themselves.

        Args:
            trained: What somebody is about to train; None for the leaves that a backward has left gradients of.

        Returns:
            Whether there are any.
        """
        if not self._lent:
            return False
        alive = [(key, name, leaf) for key, (name, ref) in self._lent.items() if (leaf := ref()) is not None]
        if trained is None:
            leaves = [each for each in alive if each[2].grad is not None]
        else:
            wanted = {id(each) for each in trained}
            leaves = [each for each in alive if each[0] in wanted]
        if not leaves or not self.allowed():
            return False
        for key, name, leaf in leaves:
            del self._lent[key]
            self.held[key] = self._parameters[key] = name, leaf
            self._make_room(name)
        return True

    def _make_room(self, name: str) -> None:
        """Lets the oldest leaves of a name go: a loop may make itself new ones."""
        for key in [key for key, (known, _) in self.held.items() if known == name][:-_MOST]:
            del self.held[key], self._parameters[key]

    def release(self) -> None:
        """Lets go of all."""
        self._lent.clear()
        self.held.clear()


#: Attributes under which wrappers keep the module that does the work.
_INNER = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)
#: Where Lightning's Fabric keeps its wrapper.
_FABRICS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
#: The same attributes as parts of a module's qualified name, where a module inside the model is wrapped.
_IN_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
#: What ``module.compile()`` leaves among a module's attributes.
_compiled_call = operator.methodcaller("get", "_compiled_call_impl")
_version = operator.attrgetter("_version")


def _inner_name(module: nn.Module) -> str | None:
    for home, name, attribute in _INNER:
        kind = getattr(sys.modules.get(home), name, None)
        if kind is not None and type.__subclasscheck__(kind, type(module)):  # some are ABCs, which ask in Python
            return attribute
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that computes: without ``DistributedDataParallel``, FSDP1, ``torch.compile`` and others around it."""
    name = _inner_name(module)
    return unwrapped(getattr(module, name)) if name else module


def is_optimized(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` made of another one."""
    return _inner_name(module) == "_orig_mod"


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` only wraps the module that computes."""
    return _inner_name(module) is not None


def inside_fabric(module: nn.Module) -> nn.Module:
    """Returns the module inside Fabric's wrapper, which converts inputs and enters autocast; any other as it is.

    That is the model itself, perhaps in ``DistributedDataParallel``; what Fabric does around it belongs to the loop.
    """
    kinds = [getattr(sys.modules.get(home), "_FabricModule", None) for home in _FABRICS]
    inner = (
        getattr(module, "_forward_module", None) if any(kind and isinstance(module, kind) for kind in kinds) else None
    )
    return inner if isinstance(inner, nn.Module) else module


class Extent(Enum):
    """How much of some models a scope watches."""

    THE_SAME = auto()  #: all of them and no others, wrapped or not
    OVERLAPS = auto()  #: a part of them, or more than them


class Models:
    """One or several watched models.

    Args:
        roots: The models as the user holds them; wrapped ones are named as if they were not.
    """

    def __init__(self, roots: list[nn.Module]) -> None:
        self.roots = roots
        self.names: dict[int, str] = {}  #: ``id`` of a module -> qualified name
        self.types: dict[str, str] = {}
        self.modules: list[nn.Module] = []
        self.parameters: dict[int, tuple[str, Tensor]] = {}  #: ``id`` -> name, parameter or what stands in for it
        self.stand_ins = StandIns(self.parameters)  #: leaves that the loop trains in the place of parameters
        self.devices: frozenset[torch.device] = frozenset()  #: of parameters and buffers, as of `refresh`
        self.revision = 0  #: grows when `refresh` finds other layers or parameters
        self._attribute_counts: list[int] = []
        self._plain: list[tuple[nn.Module, list[str]]] = []  # the modules with tensors in plain attributes
        self._own_parameters: dict[int, list[nn.Parameter]] = {}
        self._trained: dict[int, list[nn.Parameter]] = {}
        self._held: list[int] = []
        self._attributes: list[dict[str, Any]] = []  # of the models and of every layer
        self._holds_optimized = False  # what `torch.compile` made of a module
        self.refresh()

    def refresh(self) -> bool:
        """Looks at the models again: layers and parameters may have been replaced. Returns whether any were."""
        if self.names and self._parameters_are_lent():
            return False
        before = list(self.parameters), list(self.names)
        for table in (self.names, self.types, self.parameters, self._own_parameters, self._trained):
            table.clear()
        self.modules.clear()
        self.types[""] = ""
        for index, root in enumerate(self.roots):
            prefix = "" if len(self.roots) == 1 else f"{class_name(root)}[{index}]"
            self._add(root, prefix)
        self.parameters |= self.stand_ins.held
        held = (*self.roots, *self.modules)
        self._attributes, self._holds_optimized = [each.__dict__ for each in held], any(map(is_optimized, held))
        self._held = self._held_now()
        tensors = (*(p for _, p in self.parameters.values()), *(buffer for *_, buffer in self.buffers()))
        self.devices = frozenset(tensor.device for tensor in tensors)
        changed = before != (list(self.parameters), list(self.names))
        self.revision += changed
        return changed

    def release(self) -> None:
        """Lets go of the models, for good: what is left of a closed scope keeps none of their memory."""
        self.roots = []
        tables = (self.names, self.parameters, self._own_parameters, self._trained)
        for held in (self.modules, self._plain, self._attributes, *tables):
            held.clear()
        self.stand_ins.release()

    def is_current(self) -> bool:
        """Whether the models hold the layers and parameters that the latest `refresh` found; asked at every step."""
        return self._held == self._held_now()

    def _held_now(self) -> list[int]:
        """``id`` of every layer and parameter, in order; those that are known live, so that none has another's."""
        held = self._attributes
        return _ids(held, "_modules") + _ids(held, "_parameters")

    def _parameters_are_lent(self) -> bool:
        """Whether the modules hold tensors in place of their parameters for the time of a call.

        So it is inside ``torch.func.functional_call``, and between forward and backward of FSDP2, when the whole
        weights are in the place of the shards that the optimizer has.
        """
        now = [parameter for root in self.roots for parameter in root.parameters()]
        if any(not isinstance(parameter, nn.Parameter) for parameter in now):
            return True
        held = {id(parameter) for parameter in now}
        away = any(is_sharded(p) and key not in held for key, (_, p) in self.parameters.items())
        return away and any(is_fully_sharded(module) for root in self.roots for module in root.modules())

    def _add(self, root: nn.Module, prefix: str) -> None:
        wrapper = root
        while wrapper is not unwrapped(wrapper):
            self.names[id(wrapper)] = prefix
            wrapper = getattr(wrapper, _inner_name(wrapper) or "module")
        for name, module in wrapper.named_modules():
            full = ".".join(filter(None, (prefix, without_wrappers(name))))
            if id(module) not in self.names:
                self.names[id(module)] = full
                self.modules.append(module)
            if _inner_name(module) is None:
                self.types.setdefault(full, class_name(module))
            for leaf, parameter in module.named_parameters(recurse=False):
                self.parameters.setdefault(id(parameter), (".".join(filter(None, (full, leaf))), parameter))

    @property
    def compiled(self) -> bool:
        """Whether any part may run as compiled code."""
        return dynamo.in_use() or self._holds_optimized or any(map(_compiled_call, self._attributes))

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        """Whether any of ``parameters`` belongs to a watched model."""
        return any(id(parameter) in self.parameters for parameter in parameters)

    def trained(self) -> Iterator[Tensor]:
        """The parameters that are trained, without those that something stands in for."""
        replaced = {name for name, _ in self.stand_ins.held.values()}
        for key, (name, parameter) in self.parameters.items():
            if parameter.requires_grad and (key in self.stand_ins.held or name not in replaced):
                yield parameter

    def module_type(self, name: str) -> str:
        """Class name of the module with a qualified name."""
        return self.types.get(name, "")

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every buffer: its module's name, its own name and itself."""
        return ((self.names[id(module)], name, buffer) for module, name, buffer in held_buffers(self.modules))

    def mutable_tensors(self) -> Iterator[Tensor]:
        """Yields what a forward may change in place: buffers, frozen parameters, tensors in plain attributes."""
        yielded: set[int] = set()
        for module in self.modules:
            held = vars(module)
            frozen = [p for p in held["_parameters"].values() if p is not None and not p.requires_grad]
            plain = [value for value in list(held.values()) if issubclass(type(value), Tensor)]
            for tensor in (*held["_buffers"].values(), *frozen, *plain):
                if tensor is not None and id(tensor) not in yielded and tensor.is_leaf:
                    yielded.add(id(tensor))
                    yield tensor

    def replaceable_tensors(self) -> list[int]:
        """``id`` of every buffer and of every tensor in a plain attribute: what code replaces instead of writing it."""
        held = self._attributes[len(self.roots) :]
        counts = list(map(len, held))
        if counts != self._attribute_counts:
            self._attribute_counts, self._plain = counts, list(self._with_plain_tensors())
        plain = [id(vars(module).get(name)) for module, names in self._plain for name in names] if self._plain else ()
        return [*_ids(held, "_buffers"), *plain]

    def _with_plain_tensors(self) -> Iterator[tuple[nn.Module, list[str]]]:
        for module in self.modules:
            names = [name for name, value in list(vars(module).items()) if issubclass(type(value), Tensor)]
            if names:
                yield module, names

    def see_what_is_trained(self) -> None:
        """A loop may freeze and thaw parameters from step to step, and within one."""
        self._trained.clear()

    def versions(self, module: nn.Module) -> list[int]:
        """The in-place change counters of the parameters of a module that are trained, as of `see_what_is_trained`."""
        trained = self._trained.get(id(module))
        past_dispatch, past_functions = past_modes()
        with past_dispatch, past_functions:  # a function mode would hear of each
            if trained is None:
                own = self._own_parameters.setdefault(id(module), [])
                own += () if own else module.parameters()
                trained = self._trained[id(module)] = [parameter for parameter in own if parameter.requires_grad]
            return list(map(_version, trained))

    def weight_norms(self) -> list[Tensor]:
        """The L2 norm of every dense trainable parameter, as far as it lies on this rank, as device scalars."""
        trainable = (p for _, p in self.parameters.values() if p.requires_grad and not p.is_meta)
        trained = [local(p) for p in trainable if p.layout is torch.strided]
        held = [each for weight in trained for each in (inner_tensors(weight) or [weight])]
        weights = [each.detach() for each in held if each.is_floating_point() or each.is_complex()]
        return list(torch._foreach_norm(weights)) if weights else []

    def main_type(self) -> str:
        """Class name of the first model."""
        return class_name(unwrapped(self.roots[0]))

    def main_device(self) -> torch.device:
        """The device of the first parameter with memory; the CPU without any."""
        devices = (parameter.device for _, parameter in self.parameters.values() if not parameter.is_meta)
        return next(devices, torch.device("cpu"))


def held_buffers(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every buffer that modules hold themselves: its module, its own name and itself."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def _ids(held: list[dict[str, Any]], table: str) -> list[int]:
    """``id`` of everything in one table of each of the modules whose attributes are ``held``."""
    return list(map(id, chain.from_iterable(map(dict.values, map(operator.itemgetter(table), held)))))


def without_wrappers(name: str) -> str:
    """``block.0`` for ``block._orig_mod.0``: names as in the model that the user wrote."""
    return ".".join(part for part in name.split(".") if part not in _IN_NAMES)


def extent(models: Models, roots: list[nn.Module]) -> Extent | None:
    """How much of ``roots`` is among watched models; None where nothing is."""
    if {id(unwrapped(root)) for root in roots} == {id(unwrapped(root)) for root in models.roots}:
        return Extent.THE_SAME
    held = any(id(module) in models.names for root in roots for module in root.modules())
    return Extent.OVERLAPS if held else None
