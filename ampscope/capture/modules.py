"""The coat of a watched model: its outermost calls go through the step watch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ampscope.capture import coat
from ampscope.capture.models import Models, is_compiled

#: Steps during which every submodule's call is looked at, to learn which of them the loop calls by itself.
LEARNING_STEPS = 2


class Caller(Protocol):
    """Who takes part in an outermost call of a watched module."""

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs ``forward(*args, **kwargs)``."""


class WatchedModule(coat.Coat):
    """Behaviour of a module that a scope watches."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, through its watch."""
        forward = super().__call__  # type: ignore[misc]  # the module's class comes next in the order
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        return self.ampscope_owner.called(self, forward, args, kwargs)


class ModuleWatch:
    """Puts coats on the models and passes on the outermost of their calls.

    At first submodules wear one too, because a loop may call ``model.encoder(x)`` and never the root; after
    `LEARNING_STEPS` only those stay that were called by the loop itself.

    Args:
        models: The watched models.
        caller: Takes part in outermost calls.
    """

    def __init__(self, models: Models, caller: Caller) -> None:
        self._models = models
        self._caller = caller
        self._thread = threading.get_ident()
        self._depth = 0
        self._called: set[int] = set()
        self._coated: dict[int, nn.Module] = {}
        self._steps = 0
        self._learning = True

    def install(self) -> None:
        """Puts the coats on."""
        for module in (*self._models.roots, *self._submodules()):
            if id(module) not in self._coated and not coat.is_coated(module):
                self._coated[id(module)] = coat.put_on(module, WatchedModule, self)

    def uninstall(self) -> None:
        """Takes every coat off."""
        for module in self._coated.values():
            coat.take_off(module)
        self._coated.clear()

    def stepped(self) -> None:
        """A step is over; after the last learning step the coats that nobody needs come off."""
        self._steps += bool(self._called)
        if self._learning and self._steps >= LEARNING_STEPS:
            self._learning = False
            keep = self._called | {id(root) for root in self._models.roots}
            for key in [key for key in self._coated if key not in keep]:
                coat.take_off(self._coated.pop(key))

    def _submodules(self) -> list[nn.Module]:
        if self._models.compiled:
            return [module for module in self._models.modules if is_compiled(module)]
        return [module for module in self._models.modules if not isinstance(module, torch.jit.ScriptModule)]

    def called(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module with a coat was called."""
        if self._depth or id(module) not in self._coated or threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        self._called.add(id(module))
        self._depth += 1
        try:
            return self._caller.call(module, forward, args, kwargs)
        finally:
            self._depth -= 1
