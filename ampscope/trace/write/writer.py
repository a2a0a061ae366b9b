"""The writing side of a trace: rows go in from the training thread, files that survive its death come out."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ampscope.errors import RunNotFound
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.files.folder_lock import FolderLock
from ampscope.trace.files.layout import rank_folder, table_folder
from ampscope.trace.files.recording_end import EndNote
from ampscope.trace.manifest import (
    Manifest,
    Segment,
    changed_facts,
    read_manifest,
    write_first_manifest,
    write_manifest,
)
from ampscope.trace.schema import Row, Table
from ampscope.trace.write.resume import resume_point
from ampscope.trace.write.row_queue import RowQueue
from ampscope.trace.write.sealing import sweep
from ampscope.trace.write.writing_threads import AT_ONCE, JournalThread, Notices, SealAt, SealThread


class Follower(Protocol):
    """Takes what a writer has left in its folder to another place."""

    @property
    def home(self) -> Path:
        """The place to which the folder's content is taken."""

    def begin(self) -> None:
        """Begin; the writer's threads have."""

    def end(self, release: Callable[[], None]) -> None:
        """All is written and sealed; ``release`` is called when the folder is not touched any more."""

    def wait(self) -> None:
        """Wait a while until all is there."""


class TraceWriter:
    """Writes one rank's tables of a run; the manifest is rank 0's, and until it comes that of the first rank.

    `put` costs the training thread microseconds. What was put is in the hands of the operating system, safe from
    ``kill -9``, as soon as a background thread got to it; `flush` waits for that. Single rows of `AT_ONCE` are written
    on the training thread and are safe when `put` returns, unless the disk is slow. When writing fails later
    (disk full, folder gone) nothing raises: the writer stops, keeps the error in `failure` and calls ``on_failure``.

    Attributes:
        resume: where the rows of this segment go on, read before anything was written.
        manifest: the manifest of this segment.
        home: where readers find the run: ``folder``, or where its content is taken.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        manifest: Manifest,
        rank: int = 0,
        disk_budget: int = 2 << 30,
        on_notice: Callable[[str], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        seal_at: SealAt | None = None,
        queue_rows: int = 300_000,
        follower: Follower | None = None,
    ) -> None:
        """Open a new run, or a further segment of the one in ``folder``.

        Args:
            folder: the run's folder; made if missing.
            manifest: the facts of the run; creation time and segments are filled in here.
            rank: rank of this process.
            disk_budget: bytes the whole run may take; each of ``manifest.world_size`` ranks keeps to its share.
            on_notice: told, once per kind, what had to be dropped. Called from a background thread; must not raise.
            on_failure: told the error that ended writing. Called from a background thread; must not raise.
            seal_at: when a journal is sealed into Parquet; by default at 250 000 rows or 16 MiB, sooner when the
                budget is small.
            queue_rows: rows that may wait in memory before bulk rows are dropped; about 500 bytes each.
            follower: takes what is written to another place.

        Raises:
            OSError: the folder cannot be written, or another process writes it (``BlockingIOError``).
            RunDamaged, RunTooNew: the folder holds a run that this version cannot continue.
        """
        self.folder = Path(folder).absolute()  # a program may change its working directory while it trains
        self.home = self.folder if follower is None else follower.home
        self.rank = rank
        share = disk_budget // max(manifest.world_size, 1)
        own = rank_folder(self.folder, rank)
        own.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(own)
        try:
            self.resume = resume_point(self.folder, rank)
            self.manifest, mark_closed = _begin_segment(self.folder, manifest, rank, locked=lock.held)
            unsealed = [path for table in Table for path in sweep(table_folder(self.folder, rank, table))]
            end = EndNote(own)
        except BaseException:
            lock.release()
            raise
        self._queue = RowQueue(queue_rows)
        self._behind: threading.Event | None = None  #: set when what `catch_up` waited for in vain is written
        self._notices = Notices(on_notice, partial(_failed, end, on_failure))
        release = partial(_in_turn, end.close, lock.release)
        on_end = release if follower is None else partial(follower.end, release)
        threads = self._start_threads(
            share, unsealed, seal_at=seal_at or _seal_at(share), on_sealed=mark_closed, on_end=on_end
        )
        if follower is not None:
            follower.begin()
        # Runs when the writer is forgotten, and at the interpreter's exit.
        self._close = weakref.finalize(self, _close, self._queue, follower, *threads)

    def _start_threads(
        self,
        disk_budget: int,
        unsealed: list[Path],
        *,
        seal_at: SealAt,
        on_sealed: Callable[[], None],
        on_end: Callable[[], None],
    ) -> tuple[threading.Thread, threading.Thread]:
        """The thread that writes journals and the one that seals them; they keep the writer's parts, not the writer."""
        sealer = SealThread(
            self.folder, rank=self.rank, disk_budget=disk_budget, notices=self._notices, on_end=self._queue.close
        )
        for journal in unsealed:
            sealer.add(journal)
        journals = JournalThread(
            self.folder, rank=self.rank, queue=self._queue, sealer=sealer, notices=self._notices, seal_at=seal_at
        )
        self._journals = journals
        journals.start(on_sealed=on_sealed, on_end=on_end)
        return journals.thread, sealer.thread

    @property
    def dropped(self) -> int:
        """Rows that were refused because the disk was too slow."""
        return self._queue.dropped

    @property
    def failure(self) -> BaseException | None:
        """The error that ended writing, if any."""
        return self._notices.failure

    def put(self, table: Table, rows: Sequence[Row] | ColumnBlock) -> None:
        """Leave rows to be written and return at once.

        Does nothing after `close`, after a failure, and in a forked child (a DataLoader's worker).
        """
        single = None if isinstance(rows, ColumnBlock) or len(rows) != 1 else rows[0]
        at_once = single is not None and table in AT_ONCE and self._queue.has_come_to(table)
        if not (at_once and single is not None and self._journals.append_at_once(table, single)):
            self._queue.put(table, rows)

    def waits(self, *tables: Table) -> bool:
        """Whether rows of any of these tables were put and are not in its journal yet."""
        return self._queue.waits(*tables)

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Wait until all that was put so far is in the journals.

        Args:
            timeout: seconds to wait at most; None waits for as long as it takes.

        Returns:
            Whether it is; False after a failure, a timeout, or in a forked child.
        """
        if not self._queue.here:
            return False
        marker = self._queue.mark()
        return marker.wait(timeout) and self.failure is None

    def catch_up(self, moment: float) -> None:
        """Wait until all that was put so far is in the journals, but no longer than a moment.

        Where that was in vain (the disk is slow) it is not tried again before those rows are written.

        Args:
            moment: seconds.
        """
        if self._queue.is_written or not self._queue.here:
            return
        if self._behind is None or self._behind.is_set():
            marker = self._queue.mark()
            self._behind = None if marker.wait(moment) else marker

    def close(self) -> None:
        """Write and seal everything, mark the run closed, end the threads; a second call does nothing."""
        self._close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failed(end: EndNote, on_failure: Callable[[BaseException], None] | None, failure: BaseException) -> None:
    end.write(failure)
    if on_failure is not None:
        on_failure(failure)


def _in_turn(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


#: Seconds that closing may take before it is left to the background thread, or at exit given up.
_CLOSE_TIMEOUT = 60.0


def _close(queue: RowQueue, follower: Follower | None, *threads: threading.Thread) -> None:
    if not queue.here:
        return
    queue.close()
    if threading.current_thread() not in threads:  # the garbage collector may run in any of them
        threads[0].join(_CLOSE_TIMEOUT)
        if follower is not None:
            follower.wait()


def _begin_segment(folder: Path, manifest: Manifest, rank: int, *, locked: bool) -> tuple[Manifest, Callable[[], None]]:
    """Enter this process into the manifest: rank 0 as a segment, any other only where there is no manifest yet.

    Returns:
        The manifest, and what this process does to it when all its rows are written.
    """
    now = time.time()
    first = False
    changed: dict[str, tuple[Any, Any]] = {}
    try:
        before = read_manifest(folder)
        changed = changed_facts(before, manifest) if before.segments else {}
        manifest = replace(manifest, created=before.created, segments=before.segments)
    except RunNotFound:
        manifest = replace(manifest, created=manifest.created or now, segments=(), closed=None)
        first = rank > 0 and write_first_manifest(folder, manifest)
    if rank == 0:
        segment = Segment(started=now, pid=os.getpid(), locked=locked, changed=changed)
        manifest = replace(manifest, segments=(*manifest.segments, segment), closed=None)
        write_manifest(folder, manifest)
    return manifest, _MarkClosed(folder, manifest, rank) if first or rank == 0 else _nothing


def _nothing() -> None:
    """Others close the manifest."""


class _MarkClosed:
    """Marks the manifest closed: rank 0's own, or the first of a run to which rank 0 has never come."""

    def __init__(self, folder: Path, manifest: Manifest, rank: int) -> None:
        self._folder = folder
        self._manifest = manifest
        self._rank = rank

    def __call__(self) -> None:
        manifest = self._manifest if self._rank == 0 else read_manifest(self._folder)
        if self._rank == 0 or not manifest.segments:
            write_manifest(self._folder, replace(manifest, closed=time.time()))


def _seal_at(disk_budget: int) -> SealAt:
    """Journals small enough that a few of them fit into the budget (bytes)."""
    return SealAt(size=min(SealAt().size, max(disk_budget // 32, 64 << 10)))
