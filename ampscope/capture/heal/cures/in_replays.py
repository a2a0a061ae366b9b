"""What replays do otherwise, to try a cure or to go without one that is in force."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ampscope.capture.heal.cures.converted_forward import ConvertedForward, convert, wider
from ampscope.capture.keep_fp32 import Float32Forward
from ampscope.capture.replay.changes import ModulesInFloat32, ReplayChange
from ampscope.capture.torch_support.models import Models


class ModulesConverted(ReplayChange):
    """What `ConversionsWider` does, or `OneForm`, in a replay.

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


class BothChanged(ModulesInFloat32):
    """What `Both` does, in a replay.

    Args:
        modules: Qualified names of those in float32.
        converted: Of those that convert.
    """

    def __init__(self, modules: tuple[str, ...], converted: tuple[str, ...]) -> None:
        super().__init__(modules)
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
