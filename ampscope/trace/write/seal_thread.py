"""The thread that seals full journals and keeps the disk budget, so that journals never wait for an fsync."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from ampscope.trace.write.disk_budget import enforce
from ampscope.trace.write.notices import Notices
from ampscope.trace.write.sealing import seal


class SealThread:
    """Takes journals that nobody appends to any more."""

    def __init__(self, run: Path, *, rank: int, disk_budget: int, notices: Notices, on_end: Callable[[], None]) -> None:
        """``on_end`` is called when a failure ends the thread; ``disk_budget`` is in bytes."""
        self._run = run
        self._rank = rank
        self._disk_budget = disk_budget
        self._notices = notices
        self._on_end = on_end
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="ampscope-seal", daemon=True)
        self.thread.start()

    def add(self, journal: Path) -> None:
        """Leave a journal to be sealed."""
        self._queue.put(journal)

    def close(self) -> None:
        """Wait until everything left so far is sealed, and end."""
        self._queue.put(None)
        self.thread.join()

    def _work(self) -> None:
        try:
            with self._notices.guard():
                while (journal := self._queue.get()) is not None:
                    seal(journal)
                    self._keep_disk_budget()
        finally:
            if self._notices.failure:
                self._on_end()

    def _keep_disk_budget(self) -> None:
        if enforce(self._run, self._rank, self._disk_budget):
            self._notices.give(
                "budget",
                f"The run in {self._run} has reached its disk budget: the oldest statistics of ops and gradients are "
                "deleted from here on, everything else is kept. Give a larger disk_budget to keep more.",
            )
