"""In what condition the tensors are that a loop carries: finite, left bad by a write, or bad as they were given."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ampscope.capture.step.carried.descent import Descent

#: Times that what a line makes was bad as it was given (a mask, a sentinel) before that is what it is for.
TIMES_GIVEN = 3


class Condition:
    """Remembers what looks at carried tensors have shown; keeps none of them alive.

    Attributes:
        descent: What comes of bad writes.
    """

    def __init__(self) -> None:
        self.descent = Descent()
        self._finite: set[str] = set()  # names of those that were seen to be
        self._given: set[str] = set()  # names of those that are not, and that no call of the loop's made so
        self._times: dict[str, int] = {}  # that each was found so
        self._unread: set[str] = set()  # labels of writes of which it was not told yet that a step has read them

    def __bool__(self) -> bool:
        """Whether something bad is there that no step has read yet."""
        return bool(self._unread and self.descent)

    def seen(self, name: str, tensors: Iterable[tuple[Tensor | None, bool]]) -> list[int]:
        """Takes down what a look has shown of the tensors of one name.

        Args:
            name: Their name.
            tensors: Each, as far as it is alive, with whether it is finite.

        Returns:
            The positions of those that are not finite, and of which it is not known yet why.
        """
        each_finite, bad = True, []
        for place, (tensor, finite) in enumerate(tensors):
            each_finite &= finite
            if finite and tensor is not None:
                self.descent.healed(tensor)
            elif not finite and not (tensor is not None and self.descent.label(tensor)):
                bad.append(place)
        if each_finite:
            self._given.discard(name)
            self._finite.add(name)
        is_known = name in self._given or self._times.get(name, 0) >= TIMES_GIVEN
        return [] if is_known else bad

    def was_finite(self, name: str) -> bool:
        """Whether one was finite when it was looked at before."""
        return name in self._finite

    def unknown(self, names: Iterable[str]) -> None:
        """A look at these was not waited for."""
        self._finite.difference_update(names)

    def given(self, names: Iterable[str]) -> None:
        """Notes tensors that are not finite though no call of the loop's made them so."""
        for name in set(names):
            self._given.add(name)
            self._times[name] = self._times.get(name, 0) + 1

    def is_given(self, name: str) -> bool:
        """Whether one only hands on what comes from outside, as a buffer for batches does."""
        return name in self._given

    def left(self, label: str) -> None:
        """A write has left something bad, which steps to come may read."""
        self._unread.add(label)

    def read(self, labels: set[str]) -> set[str]:
        """A step has read what comes of these writes; returns those that none had read before."""
        new = self._unread & labels
        self._unread -= new
        return new
