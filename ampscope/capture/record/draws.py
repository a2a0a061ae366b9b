"""Trackers' clients draw random numbers of their own: the training draws what it would have drawn without them.

A tracker is imported where there is no torch, and so is this.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ours = threading.local()
_stream = random.Random()


@contextmanager
def our_draws() -> Iterator[None]:
    """While it is open, what `separate`d modules draw on this thread leaves Python's random stream as it was."""
    _ours.open = True
    try:
        yield
    finally:
        _ours.open = False


def separate(*packages: str) -> None:
    """Makes the modules of some packages, as far as they are imported, heed `our_draws`.

    Elsewhere, on the training's thread above all, they draw what they would have drawn.

    Args:
        packages: Their names, as ``"urllib3"``.
    """
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] in packages and vars(module).get("random") is random:
            vars(module)["random"] = _RANDOM


class _Random(ModuleType):
    """The module ``random`` itself, but where `our_draws` is open."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_stream if getattr(_ours, "open", False) and hasattr(_stream, name) else random, name)


_RANDOM = _Random("random")
