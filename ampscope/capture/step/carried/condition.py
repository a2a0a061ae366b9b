"""Which of the tensors that a loop carries are finite, which are not any more, and what was made of those."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from ampscope.capture.step.carried.carried_tensors import Carried
from ampscope.capture.step.carried.gap import Gap


class Condition:
    """What is known of the condition of carried tensors; keeps none of them alive.

    Args:
        carried: Names them.
    """

    def __init__(self, carried: Carried) -> None:
        self._carried = carried
        self._finite: set[str] = set()  # names of those that were seen to be
        self._bad: dict[str, bool] = {}  # name -> whether it was told that a step has read it
        self._derived: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # what the gap made of something bad

    def turned(self, looks: dict[str, bool], born: Callable[[str], bool]) -> None:
        """Learns which carried tensors are finite and which are not any more.

        Args:
            looks: Whether each is finite.
            born: Whether the loop is known to have made what is not finite in one.
        """
        for name, finite in looks.items():
            if finite:
                self._finite.add(name)
                self._bad.pop(name, None)
            elif born(name) or name in self._finite:
                self._bad.setdefault(name, False)

    def is_new(self, name: str) -> bool:
        """Whether one that is not finite now was so when it was looked at before."""
        return name in self._finite and name not in self._bad

    def is_unread(self, name: str) -> bool:
        """Whether one is not finite, and it was not told yet that a step has read it."""
        return self._bad.get(name) is False

    def was_read(self, names: list[str]) -> None:
        """It is told that a step has read these."""
        self._bad.update(dict.fromkeys(names, True))

    def follow(self, gap: Gap) -> None:
        """Notes what the calls between two steps made of something that is not finite."""
        for name in self._bad:
            for tensor in gap.made_of(lambda each, name=name: self._carried.name(each) == name):  # type: ignore[misc]  # bound now
                self._derived[id(tensor)] = weakref.ref(tensor), name

    def forget_derived(self) -> None:
        """What was made of something bad was made for the step that is over."""
        self._derived = {}

    def derived_from(self, identity: int) -> str:
        """The name of the tensor, not finite, that the loop made another of between the steps."""
        tensor, name = self._derived.get(identity, (lambda: None, ""))
        return name if tensor() is not None else ""
