"""One thread turns waiting rows into journals; another seals full journals and keeps the disk budget."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.files.journal import Journal, RowMessages, to_batch
from ampscope.trace.files.layout import journal_path, list_table, table_folder
from ampscope.trace.schema import BULK_TABLES, Row, Table, arrow_schema
from ampscope.trace.write.disk_budget import enforce, record_share, thin_oldest
from ampscope.trace.write.row_queue import QueuedRows, RowQueue
from ampscope.trace.write.sealing import MOST_BYTES, Leftovers, merge, seal
from ampscope.trace.write.thinning import THINNED_TABLES


def _ignore(_: object) -> None:
    """Nobody asked to be told."""


class Notices:
    """Passes each kind of notice, and the first failure, to the owner's callbacks, which must not raise."""

    def __init__(
        self, on_notice: Callable[[str], None] | None = None, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self.failure: BaseException | None = None
        self._on_notice = on_notice or _ignore
        self._on_failure = on_failure or _ignore
        self._given: set[str] = set()
        self._lock = threading.Lock()

    def give(self, kind: str, text: str) -> None:
        """Tell of something that was lost, the first time this ``kind`` of thing happens."""
        with self._lock:
            known = kind in self._given
            self._given.add(kind)
        if not known:
            self._on_notice(text)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around all that a background thread does: the disk's failures end writing, not the training process."""
        try:
            yield
        except (OSError, MemoryError, pa.ArrowException) as failure:
            self.fail(failure)
        except BaseException as failure:  # a mistake of ours: ends writing too, and shows where it is
            self.fail(failure)
            raise

    def fail(self, failure: BaseException) -> None:
        """Tell why writing has stopped."""
        with self._lock:
            known = self.failure is not None
            self.failure = self.failure or failure
        if not known:
            self._on_failure(failure)


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


#: What a row that does not fit its table raises on conversion.
_MISFITS = (ValueError, TypeError, OverflowError)
#: Of the time that passes, the share that the caller's thread may spend in writing, and seconds that it may save up: a
#: moment in which another process has the processor is no slow disk.
_SHARE, _SAVED_S = 0.01, 0.1
#: Seconds that this thread waits for a row that is being appended by whoever left it.
_PATIENCE_S = 1.0
#: The tables of which a row is left in each step, and refers to no other.
AT_ONCE = frozenset({Table.STEPS, Table.SCALER_EVENTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class SealAt:
    """A journal is sealed when it reaches any of these sizes."""

    rows: int = 250_000
    size: int = 16 << 20  #: bytes
    batches: int = 4096  #: appends; a reader of an open run takes some 20 us for each

    def reached_by(self, journal: Journal) -> bool:
        """Whether the journal is full."""
        return journal.rows >= self.rows or journal.size >= self.size or journal.batches >= self.batches


class JournalThread:
    """Appends what the queue holds to one journal per table and hands full journals to the sealer."""

    def __init__(
        self, run: Path, *, rank: int, queue: RowQueue, sealer: SealThread, notices: Notices, seal_at: SealAt
    ) -> None:
        self._run = run
        self._rank = rank
        self._queue = queue
        self._sealer = sealer
        self._notices = notices
        self._seal_at = seal_at
        self._round = QueuedRows()
        self._journals: dict[Table, Journal] = {}
        self._appending = threading.RLock()  # reentrant: a row may be left in a garbage collector's callback, inside
        self._is_inside = False
        self._paid_at = 0.0  # when what was spent is within the share
        self._messages = {table: RowMessages(table) for table in AT_ONCE}
        self._on_sealed: Callable[[], None] = lambda: None
        self._on_end: Callable[[], None] = lambda: None
        self.thread = threading.Thread(target=self._work, name="ampscope-journal", daemon=True)

    def start(self, *, on_sealed: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Begin; ``on_sealed`` is called when all is written and sealed, ``on_end`` last, whatever happened."""
        self._on_sealed = on_sealed
        self._on_end = on_end
        self.thread.start()

    def append_at_once(self, table: Table, row: Row) -> bool:
        """Write a row on the caller's thread: a kill that comes next does not lose it.

        Returns:
            Whether it is written; if not (the disk was slow lately, something else is being written, or there is no
            journal to append it to), it is left to the queue.
        """
        began = time.monotonic()
        if self._would_wait(began):
            return False
        with self._appending:
            journal = self._journals.get(table)
            if self._is_inside or journal is None or self._seal_at.reached_by(journal):
                return False
            self._is_inside = True
            try:
                journal.append_message(self._messages[table].message(row), 1)
            except (*_MISFITS, OSError, pa.ArrowException):
                return False  # the thread meets the same, and tells of it
            finally:
                self._is_inside = False
                spent = (time.monotonic() - began) / _SHARE
                self._paid_at = max(self._paid_at, began - _SAVED_S / _SHARE) + spent
        return True

    def _would_wait(self, now: float) -> bool:
        """Whether something is being written, or the disk was slow lately, or is gone: training waits for none."""
        return self._is_inside or now < self._paid_at or self._notices.failure is not None

    def _work(self) -> None:
        try:
            with self._notices.guard():
                self._record_all()
        finally:
            self._round.release()  # only now, so that `flush` sees the failure
            self._queue.release()
            self._close_journals()
            self._sealer.close()
            self._on_end()

    def _record_all(self) -> None:
        self._new_journal(Table.STEPS)  # so that the first step finds it
        while not self._round.closing:
            self._round = self._queue.take()
            if self._notices.failure:
                return
            self._record(self._round)
        self._seal_all()

    def _record(self, waiting: QueuedRows) -> None:
        for table, rows in waiting.rows.items():
            for block in [block for of, block in waiting.blocks if of is table]:
                self._append(table, self._convert_block(table, block))
            if rows:
                self._append(table, self._convert(table, rows))
        self._queue.written(waiting)
        if self._queue.dropped:
            self._notices.give(
                "slow",
                f"The disk under {self._run} is too slow for this trace: rows were dropped, statistics of ops and "
                "gradients first. Trace fewer steps, or write to a faster disk.",
            )

    def _append(self, table: Table, batch: pa.RecordBatch | None) -> None:
        if batch is None:
            return
        journal = self._journals.get(table) or self._new_journal(table)
        with self._alone(table):
            journal.append(batch)
        if self._seal_at.reached_by(journal):
            self._seal(table)

    @contextmanager
    def _alone(self, table: Table) -> Iterator[None]:
        """Keeps whoever leaves rows from appending to a journal that is being written or closed.

        Not for ever: a signal's handler may close the run while the row that it came in is being appended below it, and
        waits for this thread.
        """
        if table not in AT_ONCE:
            yield
            return
        taken = self._appending.acquire(timeout=_PATIENCE_S)
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before
            if taken:
                self._appending.release()

    def _convert_block(self, table: Table, block: ColumnBlock) -> pa.RecordBatch | None:
        try:
            return block.to_batch(table)
        except _MISFITS as error:
            self._tell_misfit(table, error)
        fitting = block.fitting(table)
        return fitting.to_batch(table) if fitting and len(fitting) < len(block) else None

    def _tell_misfit(self, table: Table, error: Exception) -> None:
        self._notices.give(
            f"misfit {table}", f"A row of the table {table} could not be written and is left out: {error}"
        )

    def _convert(self, table: Table, rows: list[Row]) -> pa.RecordBatch | None:
        try:
            return to_batch(table, rows)
        except _MISFITS as error:
            self._tell_misfit(table, error)
        if len(rows) == 1:
            return None
        fitting = [row for row in rows if self._convert(table, [row]) is not None]
        return to_batch(table, fitting) if fitting else None

    def _new_journal(self, table: Table) -> Journal:
        folder = table_folder(self._run, self._rank, table)
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(journal_path(folder, list_table(folder).next_number), arrow_schema(table))
        self._journals[table] = journal
        return journal

    def _seal(self, table: Table) -> None:
        with self._alone(table):
            journal = self._journals.pop(table)
            journal.close()
        if journal.rows:
            self._sealer.add(journal.path)
        else:
            journal.path.unlink(missing_ok=True)

    def _seal_all(self) -> None:
        for table in list(self._journals):
            self._seal(table)
        self._sealer.close()
        if not self._notices.failure:
            self._on_sealed()

    def _close_journals(self) -> None:
        for table in list(self._journals):
            with self._alone(table):
                self._journals.pop(table).close()
