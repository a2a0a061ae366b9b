"""Modules in float32, and float32 where they convert to a half dtype themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ampscope.capture.heal.cures.converted_forward import ConvertedForward, convert
from ampscope.capture.heal.cures.in_replays import BothChanged, ModulesConverted, Without
from ampscope.capture.heal.cures.lasting_cure import LastingCure
from ampscope.capture.keep_fp32 import KeptModules, kept
from ampscope.capture.replay.changes import ModulesInFloat32, ReplayChange
from ampscope.trace.schema import CureKind


class ModulesKept(LastingCure):
    """Modules in float32, as `ampscope.keep_fp32` keeps them.

    Args:
        modules: The modules, by qualified name.
    """

    kind = CureKind.MODULES_FP32

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._held = dict(modules)
        self.modules = tuple(modules)
        self._handle: KeptModules | None = None

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"{_named(self.modules)} in float32"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"ampscope.keep_fp32(model, {list(self.modules)!r})"

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        return {"kept": list(self.modules)}

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return ModulesInFloat32(self.modules)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return Without(self.modules)

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        self._handle = self._handle or kept(self._held)

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
        self._kept, self._converted = kept, converted
        self.modules = tuple(dict.fromkeys((*kept.modules, *converted.modules)))

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"{self._kept.text}, and {self._converted.text}"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"{self._kept.code}  {self._converted.code}".strip()

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        return self._kept.detail | self._converted.detail

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return BothChanged(self._kept.modules, self._converted.modules)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return Without(self.modules)

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        self._kept.apply()
        self._converted.apply()

    def lift(self) -> None:
        """See `LastingCure.lift`."""
        self._converted.lift()
        self._kept.lift()


def _named(modules: tuple[str, ...]) -> str:
    named = [module or "the model" for module in modules]
    return ", ".join(named) if len(named) < 4 else f"{', '.join(named[:3])} and {len(named) - 3} more"
