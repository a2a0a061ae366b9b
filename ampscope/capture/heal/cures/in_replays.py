"""Changes that replays make to try a cure, or to go without one that is in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ampscope.capture.heal.cures.converted_forward import ConvertedForward, convert, wider
from ampscope.capture.keep_fp32.keeping import Float32Forward, Outputs, in_float32, own_forward
from ampscope.capture.replay.changes import ModulesInFloat32, ReplayChange
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import tensors
from ampscope.capture.tracing.statistics.stats import can_be_bad


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

    def __init__(self, modules: tuple[str, ...], outputs: Mapping[str, Outputs]) -> None:
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

    def __init__(self, modules: tuple[str, ...], outputs: Mapping[str, Outputs], converted: tuple[str, ...]) -> None:
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
