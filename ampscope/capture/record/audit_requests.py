"""Decides which steps are audited: every so many, or the next one where the loop has asked for it."""

from __future__ import annotations

from collections import deque
from typing import Any

from ampscope.capture.record.settings import quoted
from ampscope.errors import WatchError

#: What a step may be compared with.
REFERENCES = ("float32", "float64")


class AuditRequests:
    """Holds the audits that were asked for, until a healthy step has served them."""

    def __init__(self) -> None:
        self._every: int | None = None
        self._asked: deque[str] = deque()
        self._served: dict[int, int] = {}  # by optimizer, which of the turns that come every so many steps

    @property
    def every(self) -> int | None:
        """Audit one step in so many; None for none."""
        return self._every

    @every.setter
    def every(self, every: int | None) -> None:
        if every != self._every:
            self._every = every
            self._served.clear()  # turns of other lengths

    def ask(self, dtype: Any) -> None:
        """Asks for an audit of the next healthy step, from any thread.

        Raises:
            WatchError: Nothing can be compared with that dtype.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in REFERENCES:
            raise WatchError(f"audit(dtype={quoted(dtype)}): give {' or '.join(map(repr, REFERENCES))}")
        self._asked.append(name)

    def due(self, step: int, optimizer: int) -> str:
        """The dtype that a step is to be compared with; empty where no audit is due.

        Args:
            step: Its number.
            optimizer: That of its optimizer.
        """
        if self._asked:
            return self._asked[0]
        if not self._every:
            return ""
        return REFERENCES[0] if self._turn(step) > self._served.setdefault(optimizer, step // self._every) else ""

    def served(self, step: int, optimizer: int) -> None:
        """Takes the audit that was due as done: it was made, or cannot be."""
        if self._asked:
            self._asked.popleft()
        if self.every:
            self._served[optimizer] = self._turn(step)

    @property
    def waiting(self) -> int:
        """How many were asked for and have found no healthy step."""
        return len(self._asked)

    def _turn(self, step: int) -> int:
        return (step + 1) // (self.every or 1)
