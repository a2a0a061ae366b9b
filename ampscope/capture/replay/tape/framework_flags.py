"""Sets again the flags that a framework has set during a call, for hooks of its own that run again in a replay."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import NamedTuple

from ampscope.capture.torch_support.calls.threads import Together

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
    with contextlib.ExitStack() as stack:
        for flag in flags:
            stack.enter_context(_together(flag))
        yield


@cache
def _together(flag: Flag) -> Together:
    return Together(partial(_set, flag))


@contextlib.contextmanager
def _set(flag: Flag) -> Iterator[None]:
    home = sys.modules[flag.home]
    before = getattr(home, flag.name)
    setattr(home, flag.name, True)
    try:
        yield
    finally:
        setattr(home, flag.name, before)
