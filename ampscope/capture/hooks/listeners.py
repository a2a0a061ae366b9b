"""Who is told of the calls that hooks hear, in the order in which they joined."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

L = TypeVar("L")


class Listeners(Generic[L]):
    """Listeners, none of them kept alive: whether a scope is still wanted is seen by who else holds it."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[L]] = []

    def join(self, listener: L) -> None:
        """Tells ``listener`` from now on."""
        self._known.append(weakref.ref(listener))

    def leave(self, listener: L) -> bool:
        """Tells it no more; returns whether nobody is left. Those that are gone are forgotten too."""
        self._known = [known for known in self._known if known() is not None and known() is not listener]
        return not self._known

    def __iter__(self) -> Iterator[L]:
        for known in self._known:
            listener = known()
            if listener is not None:
                yield listener

    def __bool__(self) -> bool:
        return bool(self._known)
