"""Lets the ranks of a job decide alike, by the key-value store through which they met: no collective, no endless wait.

Every rank writes its vote and reads those of the others. What they come to is written once, by the first that knows,
and holds for all: a rank that has waited in vain, or is not there, cannot leave some of them with another decision.
"""

from __future__ import annotations

import time
from typing import Any

#: Seconds that ranks wait for each other's vote, while each runs its own step again.
WAIT_S = 120.0
_POLL_S = 0.002


class Ballot:
    """The votes of one rank, and what all came to.

    Args:
        store: The store by which the ranks met (``torch.distributed.Store``).
        key: What all questions are asked under; the same on every rank of the job, and no other job's.
        rank: Of this process.
        ranks: How many there are.
        wait_s: Seconds to wait for the others.
    """

    def __init__(self, store: Any, key: str, rank: int, ranks: int, wait_s: float = WAIT_S) -> None:
        self._store = store
        self._key = key
        self.rank = rank
        self.ranks = ranks
        self._wait_s = wait_s
        self._set("here", rank, "yes")

    def missing(self) -> list[int]:
        """The ranks that do not take part: those that have not made a ballot of this key. Waits for nobody."""
        return [rank for rank in range(self.ranks) if not self._is_set("here", rank)]

    def votes(self, question: str, vote: str) -> list[str] | None:
        """Gives this rank's vote, and waits for those of the others.

        Args:
            question: What it is about; each is asked once.
            vote: Not empty.

        Returns:
            The votes by rank; None where a rank has not given one in time, or the question is `settled` without one.
        """
        self._set(question, self.rank, vote)
        until = time.monotonic() + self._wait_s
        while not (are_given := self._are_given(question)):
            if self._is_set(question.partition("/")[0], "settled") or time.monotonic() > until:
                are_given = self._are_given(question)  # the last may have come, and been decided on, since the look
                break
            time.sleep(_POLL_S)
        return [self._get(question, rank) for rank in range(self.ranks)] if are_given else None

    def settled(self, question: str, proposal: str) -> str:
        """Returns the decision that holds for all ranks: the proposal of the first rank that asked.

        Args:
            question: The part before the ``/`` of what the votes were about.
            proposal: This rank's answer; not empty.
        """
        found = self._store.compare_set(self._name(question, "settled"), "", proposal)
        return _text(found)

    # -- the store ----------------------------------------------------------------------------------------------

    def _are_given(self, question: str) -> bool:
        return all(self._is_set(question, rank) for rank in range(self.ranks))

    def _name(self, question: str, part: object) -> str:
        return f"{self._key}/{question}/{part}"

    def _set(self, question: str, part: object, text: str) -> None:
        self._store.set(self._name(question, part), text)

    def _is_set(self, question: str, part: object) -> bool:
        return bool(self._store.check([self._name(question, part)]))

    def _get(self, question: str, part: object) -> str:
        return _text(self._store.get(self._name(question, part)))


def _text(found: Any) -> str:
    return str(found, "utf-8") if isinstance(found, bytes) else str(found)
