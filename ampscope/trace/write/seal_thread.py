"""The thread that seals full journals and keeps the disk budget, so that journals never wait for an fsync."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from ampscope.trace.files.layout import table_folder
from ampscope.trace.schema import BULK_TABLES, Table
from ampscope.trace.write.disk_budget import enforce, record_share, thin_oldest
from ampscope.trace.write.merging import MOST_BYTES, Leftovers, merge
from ampscope.trace.write.notices import Notices
from ampscope.trace.write.sealing import seal
from ampscope.trace.write.thinning import THINNED_TABLES

#: Bytes of a merged part at least, however small the budget: its footer alone takes five thousand.
_LEAST_MERGED = 64 << 10


class SealThread:
    """Takes journals that nobody appends to any more."""

    def __init__(self, run: Path, *, rank: int, disk_budget: int, notices: Notices, on_end: Callable[[], None]) -> None:
        """``on_end`` is called when a failure ends the thread; ``disk_budget`` is in bytes."""
        self._run = run
        self._rank = rank
        self._disk_budget = disk_budget
        self._most_bytes = max(min(record_share(disk_budget) // 16, MOST_BYTES), _LEAST_MERGED)
        self._leftovers = Leftovers()
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
                    self._merge(journal.parent)
                    self._keep_disk_budget()
                    self._leftovers.clear()
                self._leftovers.clear(age=0.0)
        finally:
            if self._notices.failure:
                self._on_end()

    def _merge(self, folder: Path) -> None:
        table = Table(folder.name)
        if table in BULK_TABLES:
            return
        while merge(folder, table, most_bytes=self._most_bytes):
            self._leftovers.look(folder)

    def _keep_disk_budget(self) -> None:
        lost = thin_oldest(self._run, self._rank, record_share(self._disk_budget))
        for table in THINNED_TABLES:
            self._leftovers.look(table_folder(self._run, self._rank, table))
        if lost:
            self._notices.give(
                "thinned",
                f"The steps of the run in {self._run} have reached their share of its disk budget: of old ones only "
                "every skip, every change of the scale and the extremes of loss and gradients keep their values from "
                "here on. Give a larger disk_budget to keep more.",
            )
        if enforce(self._run, self._rank, self._disk_budget):
            self._notices.give(
                "budget",
                f"The run in {self._run} has reached its disk budget: the oldest statistics of ops and gradients are "
                "deleted from here on, everything else is kept. Give a larger disk_budget to keep more.",
            )
