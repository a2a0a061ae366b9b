"""How much memory is there for the calls of a tape alone: what the loop has let go of, and a tape refers to still."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import cast

from torch import Tensor

from ampscope.capture.replay.tape.entry import Entry, OutsideTensor
from ampscope.capture.tracing.statistics.tensor_values import stored

#: Bytes of what calls between two steps have read and the loop has let go of that are kept alive.
MOST_HELD = 1 << 26
#: All calls are gone through again when they have read one part in so many more than at the last time.
_PART = 8


class HeldAlone:
    """Watches how much of what calls read is kept alive by them alone.

    Who else refers to a tensor is known from its reference count, which is looked at only where calls have read much.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()  # tensors, by ``id``
        self._bytes = 0  # of them, whoever keeps them alive
        self._enough = MOST_HELD  # bytes at which the calls are gone through
        self.too_much = False  #: it was more than is kept

    def copied(self, copies: Iterable[Tensor]) -> None:
        """The calls refer to copies."""
        self._bytes += sum(each.nbytes for each in copies)

    def called(self, entries: list[Entry]) -> None:
        """A call has been added to ``entries``."""
        for reference in entries[-1].arguments.outside:
            if id(reference.tensor) not in self._seen:
                self._seen.add(id(reference.tensor))
                self._bytes += stored(reference.tensor).nbytes
        if self._bytes > self._enough:
            held = self.look(entries)
            self._enough = self._bytes + max(MOST_HELD - held, self._bytes // _PART)

    def look(self, entries: list[Entry]) -> int:
        """The bytes that ``entries`` keep alive alone, where they have read enough for that to be too much."""
        held = held_alone(entries) if self._bytes > MOST_HELD else 0
        self.too_much = self.too_much or held > MOST_HELD
        return held


def held_alone(entries: Iterable[Entry]) -> int:
    """Bytes of what ``entries`` read from outside to which nothing else refers."""
    references = {id(each): each for entry in entries for each in entry.arguments.outside}
    holders: dict[int, list[OutsideTensor]] = {}
    for each in references.values():
        holders.setdefault(id(each.tensor), []).append(each)
    return sum(
        stored(first.tensor).nbytes
        for first, *others in holders.values()
        if _references(first) <= _BY_ONE + len(others)
    )


def _references(holder: OutsideTensor) -> int:
    """References to the tensor of ``holder``, and those that asking takes."""
    return sys.getrefcount(holder.tensor)


_BY_ONE = _references(OutsideTensor(cast(Tensor, object()), 0, 0))
