"""Cures of modules keep them in float32, or widen their own conversions to a half dtype, live and in replays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ampscope.capture.changes.replay_change import Conversions, ModulesInFloat32, ReplayChange
from ampscope.capture.heal.lasting_cure import LastingCure
from ampscope.capture.keep_fp32 import (
    Float32Forward,
    HeldForward,
    KeptModules,
    ModuleOutputs,
    in_float32,
    kept,
    own_forward,
)
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import HALF, tensors
from ampscope.capture.tracing.light_statistics import can_be_bad
from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.schema import CureKind


class ConvertedForward(HeldForward):
    """Calls the module's own ``forward`` inside a mode.

    Args:
        module: The module.
        inside: Gives what the module's own forward runs in.
    """

    travels = False

    def __init__(self, module: nn.Module, inside: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(module)
        self._inside = inside
        self._active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        if not self._active:
            return self.plain(*args, **kwargs)
        with self._inside():
            return self.plain(*args, **kwargs)

    def let_go(self) -> None:
        """Gives the module its own forward back."""
        self._active = False  # wrapped by someone else meanwhile: passes through
        self.leave()


def _nobody() -> None:
    """Nobody is told of a conversion."""


def wider() -> AbstractContextManager[Any]:
    """Conversions to a half dtype that give float32."""
    return Conversions(dict.fromkeys(HALF, torch.float32), _nobody)


def convert(module: nn.Module, inside: Callable[[], AbstractContextManager[Any]] = wider) -> ConvertedForward:
    """Puts a `ConvertedForward` into a module."""
    converted = vars(module)["forward"] = ConvertedForward(module, inside)
    return converted


class ModulesConverted(ReplayChange):
    """Does in a replay what `ConversionsWider`, or `OneForm`, does to the live model.

    Args:
        modules: Qualified names.
        inside: Gives what their forward runs in.
    """

    kind = ModulesInFloat32.kind

    def __init__(self, modules: tuple[str, ...], inside: Callable[[], AbstractContextManager[Any]] = wider) -> None:
        super().__init__()
        self.modules = modules
        self._inside = inside

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        for module in models.modules:
            if models.names[id(module)] in self.modules:
                convert(module, self._inside)


class ModulesKeptAgain(ModulesInFloat32):
    """Does in a replay what `ModulesKept` does to the live model.

    Args:
        modules: Qualified names.
        outputs: How what they return is given back.
    """

    def __init__(self, modules: tuple[str, ...], outputs: Mapping[str, ModuleOutputs]) -> None:
        super().__init__(modules)
        self._outputs = outputs

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        for module in models.modules:
            if (name := models.names[id(module)]) in self.modules:
                module.__dict__["forward"] = in_float32(own_forward(module), self._outputs.get(name))


class OutputsNoted(ReplayChange):
    """Nothing is changed, but it is noted in which half dtype some modules give what they return.

    Args:
        modules: Qualified names.
    """

    kind = ModulesInFloat32.kind

    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.modules = modules
        self._seen: dict[str, set[torch.dtype]] = {}

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        for module in models.modules:
            if (name := models.names[id(module)]) in self.modules:
                module.__dict__["forward"] = self._noting(name, module.forward)

    def _noting(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self._seen.setdefault(name, set()).update(each.dtype for each in tensors(result) if can_be_bad(each))
            return result

        return call

    def half(self) -> dict[str, torch.dtype]:
        """The half dtype of all that a module has returned, by name; without those of several dtypes."""
        return {name: next(iter(seen)) for name, seen in self._seen.items() if len(seen) == 1 and seen <= HALF}


class BothChanged(ModulesKeptAgain):
    """Does in a replay what `Both` does to the live model.

    Args:
        modules: Qualified names of those in float32.
        outputs: How what they return is given back.
        converted: Of those that convert.
    """

    def __init__(
        self, modules: tuple[str, ...], outputs: Mapping[str, ModuleOutputs], converted: tuple[str, ...]
    ) -> None:
        super().__init__(modules, outputs)
        self._converting = ModulesConverted(converted)

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        super().change_modules(models)
        self._converting.change_modules(models)


class Without(ReplayChange):
    """Modules as they compute without what was done to them.

    Args:
        modules: Qualified names.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.modules = modules

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        for module in models.modules:
            held = module.__dict__.get("forward")
            if models.names[id(module)] in self.modules and isinstance(held, (Float32Forward, ConvertedForward)):
                module.__dict__["forward"] = _plain(held)


def _plain(held: Float32Forward | ConvertedForward) -> Callable[..., Any]:
    inner = held.other
    return _plain(inner) if isinstance(inner, (Float32Forward, ConvertedForward)) else held.plain


class ModulesKept(LastingCure):
    """Modules in float32, as `ampscope.keep_fp32` keeps them.

    Args:
        modules: The modules, by qualified name.
        outputs: How what they return is given back, by name; in float32 for the others.
    """

    kind = CureKind.MODULES_FP32

    def __init__(
        self, modules: Mapping[str, nn.Module], outputs: Mapping[str, ModuleOutputs] = MappingProxyType({})
    ) -> None:
        self._held = dict(modules)
        self.modules = tuple(modules)
        self.outputs = dict(outputs)
        self._handle: KeptModules | None = None

    def giving_back(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[ModulesKept]:
        """Yields the cure with outputs in the dtype that they had: always, if that does; else where they fit."""
        if dtypes:
            yield ModulesKept(self._held, {name: ModuleOutputs(dtype) for name, dtype in dtypes.items()})
        yield ModulesKept(
            self._held, {name: ModuleOutputs(dtype, where_they_fit=True) for name, dtype in dtypes.items()}
        )

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"{_named(self.modules)} in float32"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        asked: dict[tuple[str, torch.dtype | None], list[str]] = {}
        for name in self.modules:
            each = self.outputs.get(name)
            model, inner = _within(name)
            asked.setdefault((model, None if each is None or each.where_they_fit else each.dtype), []).append(inner)
        return "; ".join(
            f"ampscope.keep_fp32({model}, {names!r}{f', outputs={dtype}' if dtype else ''})"
            for (model, dtype), names in asked.items()
        )

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        always = {name: dtype_name(each.dtype) for name, each in self.outputs.items() if not each.where_they_fit}
        fitting = {name: dtype_name(each.dtype) for name, each in self.outputs.items() if each.where_they_fit}
        return {"kept": list(self.modules), "outputs": always, "fitting_outputs": fitting}

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return ModulesKeptAgain(self.modules, self.outputs)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return Without(self.modules)

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        self._handle = self._handle or kept(self._held, self.outputs)

    def lift(self) -> None:
        """See `LastingCure.lift`."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class ConversionsWider(LastingCure):
    """Float32 where the code of some modules asks for a half dtype by name, ``x.half()``.

    Args:
        modules: The modules, by qualified name.
    """

    kind = CureKind.CONVERSIONS

    def __init__(self, modules: Mapping[str, nn.Module], places: tuple[str, ...]) -> None:
        self._held = dict(modules)
        self.modules = tuple(modules)
        self._places = places
        self._forwards: list[ConvertedForward] = []

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"float32 where {_named(self.modules)} converts to a half dtype"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"# use .float() at {', '.join(self._places)}" if self._places else ""

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        return {"converted": list(self.modules), "places": list(self._places)}

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return ModulesConverted(self.modules)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return Without(self.modules)

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        if not self._forwards:
            self._forwards = [convert(module) for module in self._held.values()]

    def lift(self) -> None:
        """See `LastingCure.lift`."""
        while self._forwards:
            self._forwards.pop().let_go()


class Both(LastingCure):
    """Modules in float32, and float32 where some convert to a half dtype: neither helps alone.

    Args:
        kept: The modules in float32.
        converted: Those that convert.
    """

    kind = CureKind.MODULES_FP32

    def __init__(self, kept: ModulesKept, converted: ConversionsWider) -> None:
        self.kept, self._converted = kept, converted
        self.modules = tuple(dict.fromkeys((*kept.modules, *converted.modules)))

    def with_kept(self, kept: ModulesKept) -> Both:
        """Returns the cure with modules kept otherwise."""
        return Both(kept, self._converted)

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"{self.kept.text}, and {self._converted.text}"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"{self.kept.code}  {self._converted.code}".strip()

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        return self.kept.detail | self._converted.detail

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return BothChanged(self.kept.modules, self.kept.outputs, self._converted.modules)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return Without(self.modules)

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        self.kept.apply()
        self._converted.apply()

    def lift(self) -> None:
        """See `LastingCure.lift`."""
        self._converted.lift()
        self.kept.lift()


def _within(name: str) -> tuple[str, str]:
    """The model that a module is found in, as a user calls it, and the module's name there."""
    several = re.match(r"\w+\[(\d+)\]\.?(.*)", name)
    return (f"models[{several[1]}]", several[2]) if several else ("model", name)


def _named(modules: tuple[str, ...]) -> str:
    named = [module or "the model" for module in modules]
    return ", ".join(named) if len(named) < 4 else f"{', '.join(named[:3])} and {len(named) - 3} more"
