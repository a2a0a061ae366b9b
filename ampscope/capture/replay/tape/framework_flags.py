"""What a framework notes about a call while it runs, in a module of its own, and asks for in hooks that run again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

#: Modules and their flags. Fabric's hook on what its models return wants every backward to go through Fabric.
_FLAGS = (
    ("lightning.fabric.wrappers", "_in_fabric_backward"),
    ("lightning_fabric.wrappers", "_in_fabric_backward"),
)


class Flag(NamedTuple):
    """A flag that is set."""

    home: str
    name: str


def raised() -> tuple[Flag, ...]:
    """The flags that are set now."""
    return tuple(Flag(*flag) for flag in _FLAGS if getattr(sys.modules.get(flag[0]), flag[1], False))


@contextlib.contextmanager
def set_again(flags: tuple[Flag, ...]) -> Iterator[None]:
    """Sets ``flags`` for the body."""
    before = [(sys.modules[flag.home], flag.name, getattr(sys.modules[flag.home], flag.name)) for flag in flags]
    try:
        for home, name, _ in before:
            setattr(home, name, True)
        yield
    finally:
        for home, name, value in before:
            setattr(home, name, value)
