"""A module's forward inside a mode: conversions to a half dtype give float32, or a call has another form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ampscope.capture.keep_fp32.held_forward import HeldForward
from ampscope.capture.replay.changes import Conversions
from ampscope.capture.torch_support.dtypes import HALF


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
