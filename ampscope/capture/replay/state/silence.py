"""Silences in a replay what a framework's module tells its trainer while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

#: Homes and names of classes, and those of their methods that tell the trainer.
_TELLING = (
    ("lightning.pytorch.core.module", "LightningModule", ("log", "log_dict", "print")),
    ("pytorch_lightning.core.module", "LightningModule", ("log", "log_dict", "print")),
)


def silenced(module: nn.Module) -> dict[str, Callable[..., None]]:
    """Attributes that make ``module`` tell its trainer nothing; most modules have no need of any."""
    return {name: _say_nothing for kind, names in _telling_kinds() if isinstance(module, kind) for name in names}


def _telling_kinds() -> Iterator[tuple[type, tuple[str, ...]]]:
    for home, name, methods in _TELLING:
        kind = getattr(sys.modules.get(home), name, None)
        if isinstance(kind, type):
            yield kind, methods


def _say_nothing(*_: Any, **__: Any) -> None:
    """Stands in the place of a method that tells the trainer something."""
