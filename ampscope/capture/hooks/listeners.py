"""Who is told of the calls that hooks hear, in the order in which they joined; of those of their own thread only."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import Generic, TypeVar

from ampscope.capture.torch_support.calls.threads import HomeThread

L = TypeVar("L")


class Listeners(Generic[L]):
    """Listeners, none of them kept alive: whether a scope is still wanted is seen by who else holds it.

    Whoever lets any join or leave holds `threads.changing`.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[L], HomeThread]] = []

    def join(self, listener: L, home: HomeThread) -> None:
        """Tells ``listener`` from now on of what its thread calls."""
        self._known.append((weakref.ref(listener), home))

    def leave(self, listener: L) -> bool:
        """Tells it no more; returns whether nobody is left. Those that are gone are forgotten too."""
        self._known = [each for each in self._known if each[0]() is not None and each[0]() is not listener]
        return not self._known

    def __iter__(self) -> Iterator[L]:
        """Yields the listeners that this thread's calls concern: its own loop's, and those without a thread yet."""
        found = []
        for known, home in self._known:
            is_here = home.ident == get_ident() or not home.is_elsewhere
            if is_here and (listener := known()) is not None:
                found.append(listener)
        return iter(found)

    def everywhere(self) -> list[L]:
        """All of them."""
        return [listener for known, _ in self._known if (listener := known()) is not None]

    def __bool__(self) -> bool:
        return bool(self._known)
