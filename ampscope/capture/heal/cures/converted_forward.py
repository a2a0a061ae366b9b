"""A module's forward inside a mode: conversions to a half dtype give float32, or a call has another form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ampscope.capture.replay.changes import Conversions
from ampscope.capture.torch_support.dtypes import HALF


class ConvertedForward:
    """What stands in the place of a module's ``forward``, held by the module itself; see `keep_fp32.Float32Forward`.

    Args:
        module: The module.
        inside: Gives what the module's own forward runs in.
    """

    def __init__(self, module: nn.Module, inside: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module = module
        self._inside = inside
        self.other = vars(module).get("forward")  #: a forward that someone else put into the module
        self._active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        if not self._active:
            return self.plain(*args, **kwargs)
        with self._inside():
            return self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that the module has without this."""
        if self.other is not None:
            return self.other(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def let_go(self) -> None:
        """Gives the module its own forward back."""
        self._active = False  # wrapped by someone else meanwhile: passes through
        held = vars(self._module)
        if held.get("forward") is not self:
            return
        if self.other is None:
            del held["forward"]
        else:
            held["forward"] = self.other

    @property
    def __wrapped__(self) -> Any:
        """The module's own forward, whose signature this one has."""
        return self.other if self.other is not None else type(self._module).forward.__get__(self._module)

    @property
    def __func__(self) -> Any:
        """As of a bound method: the function that the user wrote."""
        return getattr(self.__wrapped__, "__func__", self.__wrapped__)


def _nobody() -> None:
    """Nobody is told of a conversion."""


def wider() -> AbstractContextManager[Any]:
    """Conversions to a half dtype that give float32."""
    return Conversions(dict.fromkeys(HALF, torch.float32), _nobody)


def convert(module: nn.Module, inside: Callable[[], AbstractContextManager[Any]] = wider) -> ConvertedForward:
    """Puts a `ConvertedForward` into a module."""
    converted = vars(module)["forward"] = ConvertedForward(module, inside)
    return converted
