"""Leaves of the loop's own that are trained in the place of a model's parameters, which they are given to it for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

#: Leaves of one name that are counted among the parameters at a time: twins, and the averages that follow them.
_MOST = 4


class StandIns:
    """Leaves that the loop gives to a model by name, and trains in the place of its parameters (a vmapped ensemble).

    Args:
        parameters: The parameters by ``id``; what stands in for one is added.

    Attributes:
        held: Those that are counted among the parameters, by ``id``.
        allowed: Whether nobody trains the parameters themselves.
    """

    def __init__(self, parameters: dict[int, tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._lent: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self.held: dict[int, tuple[str, Tensor]] = {}
        self.allowed: Callable[[], bool] = lambda: False

    def lend(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """The loop gives these to a model, each under the name of a parameter."""
        if len(self._lent) > _MOST * len(self._parameters):
            self._lent = {key: known for key, known in self._lent.items() if known[1]() is not None}
        for name, tensor in given:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._parameters:
                self._lent[id(tensor)] = name, weakref.ref(tensor)

    def take_up(self, trained: Iterable[Tensor] | None = None) -> bool:
        """Counts leaves that were lent among the parameters, where nobody trains the parameters themselves.

        Args:
            trained: What somebody is about to train; None for the leaves that a backward has left gradients of.

        Returns:
            Whether there are any.
        """
        if not self._lent:
            return False
        alive = [(key, name, leaf) for key, (name, ref) in self._lent.items() if (leaf := ref()) is not None]
        if trained is None:
            leaves = [each for each in alive if each[2].grad is not None]
        else:
            wanted = {id(each) for each in trained}
            leaves = [each for each in alive if each[0] in wanted]
        if not leaves or not self.allowed():
            return False
        for key, name, leaf in leaves:
            del self._lent[key]
            self.held[key] = self._parameters[key] = name, leaf
            self._make_room(name)
        return True

    def _make_room(self, name: str) -> None:
        """Lets the oldest leaves of a name go: a loop may make itself new ones."""
        for key in [key for key, (known, _) in self.held.items() if known == name][:-_MOST]:
            del self.held[key], self._parameters[key]

    def release(self) -> None:
        """Lets go of all."""
        self._lent.clear()
        self.held.clear()
