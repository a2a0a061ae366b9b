"""Runs are compacted rank by rank, each under its writer's lock, and only where nobody writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ampscope.errors import RunError
from ampscope.trace.files.folder_lock import FolderLock, is_locked
from ampscope.trace.files.layout import TEMPORARY_SUFFIX, rank_folder, ranks, table_folder
from ampscope.trace.joined_parts import TableFiles
from ampscope.trace.location import BucketPath
from ampscope.trace.manifest import read_manifest, write_manifest
from ampscope.trace.schema import SCHEMA_VERSION, Table
from ampscope.trace.write.sealing import AGE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The files of a run's tables."""

    files: int
    bytes: int | None  #: null of what is only planned


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """A part of the run that was not compacted, or not to the end."""

    path: str  #: a rank's folder, a table's, a file, or the run
    why: str  #: a sentence
    failed: bool  #: false where it is only not the time: a process writes there


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedRun:
    """The compaction of one run."""

    run: str  #: its folder
    ranks: int
    before: Contents
    after: Contents  #: of a dry run what there would be; superseded files that are not removed yet are counted
    sealed: int  #: journals that a dead process had left and that are parts now
    merged: int  #: parts whose rows are in a larger one now
    waiting: int  #: superseded files that are not removed yet: a reader may still be about to open them
    left_alone: tuple[LeftAlone, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """A compaction of some runs."""

    dry_run: bool  #: whether it was only looked at
    runs: tuple[CompactedRun, ...]


#: Seconds after the last row during which a run that was not closed may have a writer on another machine, where file
#: systems that several machines share do not tell each the locks of the others.
QUIET_S = 120.0
#: Seconds for which a lock is kept, and for which others may take it then: a training that begins waits no longer.
_HELD_S, _GIVEN_S = 1.0, 0.1
_WRITTEN = "It is being written by a process; left alone."
_MAY_BE_WRITTEN = (
    "It was written less than two minutes ago and is not closed: a process on another machine may be writing it. Left "
    "alone; ask again later."
)


def compact(
    folders: Sequence[Path], *, dry_run: bool = False, age: float = AGE_S, waits: Callable[[float], None] = time.sleep
) -> Compaction:
    """Merge the small parts of runs at rest. What a reader reads of them stays the same, at every instant.

    Files whose rows others hold are removed ``age`` seconds later, for which this waits, all runs together.

    Args:
        folders: The runs.
        dry_run: Only look what would be done.
        age: Seconds after which no reader is about to open a file that it has listed; 0 where nobody reads.
        waits: Called with the seconds to wait.
    """
    begun = [_Run(folder) for folder in folders]
    for each in begun:
        each.plan() if dry_run else each.merge()
    if not dry_run:
        waiting = [each for each in begun if each.clear(age=age)]
        if waiting:
            waits(age)
        for each in waiting:
            each.clear(age=age)
    return Compaction(dry_run=dry_run, runs=tuple(each.result(dry_run=dry_run) for each in begun))


class _Run:
    """One run while it is compacted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: dict[str, LeftAlone] = {}
        self._ranks: list[int] = []
        self._open: list[int] = []  # ranks that are compacted
        self._planned = self._sealed = self._merged = self._waiting = 0
        self._is_closed, self._schema = False, SCHEMA_VERSION
        self._before = Contents(files=0, bytes=0)
        if isinstance(folder, BucketPath):
            self._leave(
                folder, "It lies in an object store, where nothing is merged: compact it on a disk.", failed=True
            )
            return
        try:
            manifest = read_manifest(folder)
            self._is_closed, self._schema = manifest.closed is not None, manifest.schema
            self._before = contents(folder, found := ranks(folder))
            self._ranks = found
        except (RunError, OSError) as error:
            self._leave(folder, str(error), failed=True)

    def plan(self) -> None:
        for rank in self._ranks:
            if why := self._why_not(rank):
                self._leave(rank_folder(self._folder, rank), why)
                self._planned += contents(self._folder, [rank]).files
            else:
                self._planned += sum(files.plan() for files in self._tables(rank))

    def merge(self) -> None:
        if not self._is_of_today():
            return
        for rank in self._ranks:
            if all(files.is_at_rest for files in self._tables(rank)):
                continue
            if why := self._why_not(rank):
                self._leave(rank_folder(self._folder, rank), why)
            elif self._under_lock(rank, self._merge_all(rank)):
                self._open.append(rank)

    def _is_of_today(self) -> bool:
        """Name today's version in the manifest of an older run that is about to have merged parts.

        A reader of version 2 passes over their names, and would show the rest as the whole run.
        """
        if self._schema >= SCHEMA_VERSION or not any(
            files.plan() < files.count for rank in self._ranks for files in self._tables(rank)
        ):
            return True
        folders = [rank_folder(self._folder, rank) for rank in self._ranks]
        written = [folder for folder in folders if is_locked(folder)]
        for folder in written:
            self._leave(folder, f"{_WRITTEN[:-1]}, and with it the run, which is of an older version.")
        return not written and self._under_lock(self._ranks[0], self._lift())

    def _lift(self) -> Iterator[None]:
        write_manifest(self._folder, replace(read_manifest(self._folder), schema=SCHEMA_VERSION))
        yield

    def clear(self, *, age: float) -> int:
        """Remove superseded files; returns how many have to wait."""
        self._waiting = 0
        for rank in self._open:
            self._under_lock(rank, self._clear_all(rank, age))
        return self._waiting

    def result(self, *, dry_run: bool) -> CompactedRun:
        after = Contents(files=self._planned, bytes=None) if dry_run else contents(self._folder, self._ranks)
        return CompactedRun(
            run=str(self._folder),
            ranks=len(self._ranks),
            before=self._before,
            after=after,
            sealed=self._sealed,
            merged=self._merged,
            waiting=self._waiting,
            left_alone=tuple(self._left.values()),
        )

    def _merge_all(self, rank: int) -> Iterator[None]:
        """Seals and merges; after each change the lock may be given away for a moment."""
        for files in self._tables(rank):
            self._sealed += files.seal()
            yield
            while merged := files.merge_next():
                self._merged += merged
                yield

    def _clear_all(self, rank: int, age: float) -> Iterator[None]:
        for files in self._tables(rank):
            self._waiting += files.clear(age=age)
            yield

    def _under_lock(self, rank: int, work: Iterator[None]) -> bool:
        """Do some work as nobody else writes; returns whether all of it is done."""
        folder = rank_folder(self._folder, rank)
        try:
            is_done = False
            while not is_done:
                with _lock(folder) as until:
                    is_done = all(time.monotonic() < until for _ in work)
                if not is_done:
                    time.sleep(_GIVEN_S)
        except BlockingIOError:
            self._leave(folder, _WRITTEN)
        except OSError as error:
            self._leave(folder, f"It cannot be changed: {error.strerror or error}.", failed=True)
        else:
            return True
        return False

    def _why_not(self, rank: int) -> str:
        """Why a rank is left alone: somebody writes it, or may; empty where nobody does."""
        folder = rank_folder(self._folder, rank)
        if is_locked(folder):
            return _WRITTEN
        is_quiet = self._is_closed or time.time() - _last_row(folder) >= QUIET_S
        return "" if is_quiet else _MAY_BE_WRITTEN

    def _tables(self, rank: int) -> Iterator[TableFiles]:
        folders = [table_folder(self._folder, rank, table) for table in Table]
        for folder in folders:
            if folder.is_dir():
                yield TableFiles(folder, lambda path, why: self._leave(path, why, failed=True))

    def _leave(self, path: Path, why: str, *, failed: bool = False) -> None:
        self._left.setdefault(str(path), LeftAlone(path=str(path), why=why, failed=failed))


def contents(folder: Path, of: Sequence[int]) -> Contents:
    """The files that tables of some ranks consist of, whatever state they are in."""
    sizes = [state.st_size for rank in of for _, state in _states(rank_folder(folder, rank))]
    return Contents(files=len(sizes), bytes=sum(sizes))


@contextmanager
def _lock(folder: Path) -> Iterator[float]:
    """Hold a rank's folder; gives the moment at which others may be waiting for it.

    Raises:
        BlockingIOError: a process writes there.
        OSError: the folder cannot be written, or the file system knows no locks.
    """
    lock = FolderLock(folder, tidying=True)
    try:
        if not lock.held:
            raise OSError("the file system knows no locks, so that nobody can tell whether a process writes here")
        yield time.monotonic() + _HELD_S
    finally:
        lock.release()


def _last_row(folder: Path) -> float:
    kept = (state.st_mtime for name, state in _states(folder) if not name.endswith(TEMPORARY_SUFFIX))
    return max(kept, default=0.0)


def _states(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The files of a rank's tables, as far as they do not go while this looks."""
    for table in Table:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder / table.value) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)
