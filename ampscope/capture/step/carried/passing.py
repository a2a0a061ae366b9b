"""What a loop makes between two steps for the one that comes, or for one much later, before it is known which."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from ampscope.capture.replay.tape.entry import EarlierResult
from ampscope.capture.step.carried.gap import Gap


class Passing:
    """Names of results of the calls between steps that nothing is known to carry; keeps none of them alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._count = 0

    def __contains__(self, name: str) -> bool:
        return name.startswith("made between steps")

    def name_by_id(self, identity: int) -> str:
        """What a result that is alive is called, by its ``id``; empty where it has no name."""
        tensor, name = self._names.get(identity, (lambda: None, ""))
        return name if tensor() is not None else ""

    def name_those(
        self, gap: Gap, wanted: Callable[[Tensor], bool], kept: Callable[[str], bool]
    ) -> dict[str, tuple[Tensor, EarlierResult]]:
        """Names results of the calls between two steps.

        Args:
            gap: The calls.
            wanted: Whether a result gets a name.
            kept: Whether the name of an earlier one is still needed.

        Returns:
            Those that got one, with the result that each is.
        """
        self._names = {
            identity: (tensor, name)
            for identity, (tensor, name) in self._names.items()
            if tensor() is not None and kept(name)
        }
        found = {}
        for tensor, source in gap.results():
            if not self.name_by_id(id(tensor)) and wanted(tensor):
                self._count += 1
                name = f"made between steps {self._count}"
                self._names[id(tensor)] = weakref.ref(tensor), name
                found[name] = tensor, source
        return found
