"""Modules in float32, and float32 where they convert to a half dtype themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ampscope.capture.heal.cures.converted_forward import ConvertedForward, convert
from ampscope.capture.heal.cures.in_replays import BothChanged, ModulesConverted, ModulesKeptAgain, Without
from ampscope.capture.heal.cures.lasting_cure import LastingCure
from ampscope.capture.keep_fp32.keeping import KeptModules, Outputs, kept
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.schema import CureKind


class ModulesKept(LastingCure):
    """Modules in float32, as `ampscope.keep_fp32` keeps them.

    Args:
        modules: The modules, by qualified name.
        outputs: How what they return is given back, by name; in float32 for the others.
    """

    kind = CureKind.MODULES_FP32

    def __init__(self, modules: Mapping[str, nn.Module], outputs: Mapping[str, Outputs] = MappingProxyType({})) -> None:
        self._held = dict(modules)
        self.modules = tuple(modules)
        self.outputs = dict(outputs)
        self._handle: KeptModules | None = None

    def giving_back(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[ModulesKept]:
        """Yields the cure with outputs in the dtype that they had: always, if that does; else where they fit."""
        if dtypes:
            yield ModulesKept(self._held, {name: Outputs(dtype) for name, dtype in dtypes.items()})
        yield ModulesKept(self._held, {name: Outputs(dtype, where_they_fit=True) for name, dtype in dtypes.items()})

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
