"""Takes rows from the training thread into a queue that never blocks, bounded by the rows it holds."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.schema import BULK_TABLES, Row, Table

#: Rows in one round of the journal thread, so that converting them takes little memory.
_ROUND_ROWS = 20_000
#: What a row refers to is written before it, and an incident after its evidence.
_ORDER = (
    Table.PARAMS,
    Table.SITES,
    Table.OPS,
    Table.EDGES,
    Table.GRADS,
    Table.STEPS,
    Table.SCALER_EVENTS,
    Table.FINDINGS,
    Table.EVENTS,
    Table.REPLAYS,
    Table.AUDIT_OPS,
    Table.AUDITS,
    Table.INCIDENTS,
)

#: What is put.
_Given = tuple[Table, tuple[Row, ...] | ColumnBlock]


@dataclass(slots=True)
class QueuedRows:
    """The rows and markers that the journal thread writes next."""

    rows: dict[Table, list[Row]] = field(default_factory=lambda: {table: [] for table in _ORDER})
    blocks: list[tuple[Table, ColumnBlock]] = field(default_factory=list)  #: rows that come as columns
    markers: list[threading.Event] = field(default_factory=list)  #: set when all before them is written
    size: int = 0  #: rows in it
    closing: bool = False

    def release(self) -> None:
        """Set the markers: what came before them is written, or never will be."""
        for marker in self.markers:
            marker.set()


class RowQueue:
    """The queue between training threads and the journal thread.

    ``put`` takes no lock that the journal thread holds while it works, and may be called from a garbage collector's
    callback inside itself. In a forked child it does nothing: there is no such thread there.
    """

    def __init__(self, limit: int) -> None:
        """Hold at most ``limit`` rows of bulk tables and twice that of all others."""
        self.dropped = 0  #: rows refused because the disk is too slow
        self._limit = limit
        self._unwritten = 0
        self._of_table: Counter[Table] = Counter()  # likewise, of each
        self._open = True
        self._ended = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: see above
        self._queue: queue.SimpleQueue[_Given | threading.Event | None] = queue.SimpleQueue()

    @property
    def here(self) -> bool:
        """Whether this is the process that the journal thread runs in."""
        return os.getpid() == self._pid

    def put(self, table: Table, rows: Sequence[Row] | ColumnBlock) -> None:
        """Leave rows for the journal thread."""
        if not self._open or not rows or not self.here:
            return
        limit = self._limit if table in BULK_TABLES else 2 * self._limit
        with self._lock:
            if self._unwritten + len(rows) > limit:
                self.dropped += len(rows)
                return
            self._unwritten += len(rows)
            self._of_table[table] += len(rows)
        self._queue.put((table, rows if isinstance(rows, ColumnBlock) else tuple(rows)))

    @property
    def is_written(self) -> bool:
        """Whether all that was put so far is written."""
        return not self._unwritten

    def waits(self, *tables: Table) -> bool:
        """Whether rows of any of these tables are not written yet."""
        return any(map(self._of_table.__getitem__, tables))

    def has_come_to(self, table: Table) -> bool:
        """Whether the next row of a table may be written past the queue: it is open, and holds none before it."""
        return self._open and not self._of_table[table] and self.here

    def written(self, done: QueuedRows) -> None:
        """The rows of a round are in the journals."""
        with self._lock:
            self._unwritten -= done.size
            for table, rows in done.rows.items():
                self._of_table[table] -= len(rows)
            for table, block in done.blocks:
                self._of_table[table] -= len(block)
        done.release()

    def mark(self) -> threading.Event:
        """An event that is set when all that was put before it is written, or never will be."""
        marker = threading.Event()
        self._queue.put(marker)
        if self._ended:
            self.release()
        return marker

    def close(self) -> None:
        """Take no more rows; the journal thread ends after those it has."""
        self._open = False
        self._queue.put(None)

    def take(self) -> QueuedRows:
        """Wait for something and return all there is, up to the size of a round."""
        result = QueuedRows()
        self._sort(self._queue.get(), result)
        while not result.closing and result.size < _ROUND_ROWS:
            try:
                self._sort(self._queue.get_nowait(), result)
            except queue.Empty:
                break
        return result

    def release(self) -> None:
        """Forget what waits and set every marker: nobody will write any more."""
        self._open = False
        self._ended = True
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, threading.Event):
                item.set()

    def _sort(self, item: _Given | threading.Event | None, into: QueuedRows) -> None:
        if item is None:
            into.closing = True
        elif isinstance(item, threading.Event):
            into.markers.append(item)
        else:
            table, rows = item
            if isinstance(rows, ColumnBlock):
                into.blocks.append((table, rows))
            else:
                into.rows[table].extend(rows)
            into.size += len(rows)
