"""A look at a spool sends what there is and frees room; what a process that died has left is sent likewise."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ampscope.errors import AmpscopeError, RunError, RunUnreachable
from ampscope.trace.files.folder_lock import FolderLock
from ampscope.trace.files.layout import TEMPORARY_SUFFIX, rank_folder, ranks, table_folder
from ampscope.trace.location import BucketPath
from ampscope.trace.manifest import Manifest, read_manifest
from ampscope.trace.object_store import Store, new_store
from ampscope.trace.schema import MANIFEST, Table
from ampscope.trace.upload import spool, store_contents
from ampscope.trace.upload.store_contents import Bucket
from ampscope.trace.write.disk_budget import holds_replay
from ampscope.trace.write.sealing import seal, sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of everything that waits."""

    look: float = 5.0  #: between two looks at the spool
    journal: float = 10.0  #: between two copies of a journal that grows, at least
    bytes_a_second: float = 256 << 10  #: of a journal that grows, at most
    mark: float = 60.0  #: between two marks that the run is being written
    leftovers: float = 60.0  #: that a part which another stands for is left to its readers
    first: float = 1.0  #: before the second try after a failure
    most: float = 60.0  #: before any try
    close: float = 300.0  #: that closing waits for what is left to be sent, while some of it arrives
    stalled: float = 20.0  #: that closing waits where nothing arrives


class SpoolSync:
    """Makes the store hold what a rank's spool holds, one look at a time. It raises what the store raises.

    Attributes because each kind of thing that waits, or is told once, has its own.

    Args:
        folder: The spool.
        bucket: The rank's part of the run in the store.
        rank: Which.
        budget: Bytes that the rank's part may take in the store.
        tell: Takes a line for the user.
        joined: Whether what is in the store was fetched, so that the run goes on there.
        pace: Seconds of everything that waits.
    """

    def __init__(
        self,
        folder: Path,
        bucket: Bucket,
        rank: int,
        *,
        budget: int,
        tell: Callable[[str], None],
        joined: bool,
        pace: Pace,
    ) -> None:
        self._folder, self._bucket, self._rank, self._budget = folder, bucket, rank, budget
        self._tell, self._joined, self._pace = tell, joined, pace
        self.is_abandoned = False  #: nothing is changed any more, here or there
        self.arrived = 0  #: files
        self._manifest_sent: int | None = None
        self._journals: dict[str, tuple[int, float]] = {}  # bytes of each when it was sent, and when
        self._useless: dict[str, float] = {}  # since when
        self._marked = -float("inf")
        self._was_dropped = self._was_in_conflict = False

    def look(self, *, is_last: bool) -> bool:
        """Send what there is; whether all of it has arrived.

        Args:
            is_last: Nothing is written any more.
        """
        bucket = self._bucket
        if not bucket.is_known:
            self._meet()
        if self._manifest_sent is None:
            self._send_manifest()
        if not is_last:
            self._mark()
        here = self._files()
        for name in store_contents.to_send(here, bucket.there):
            self._send(name)
        self._send_journals(is_last=is_last)
        self._clear_store(age=0.0 if is_last else self._pace.leftovers)
        self._send_manifest()  # after the rows: it may say that the run is closed
        if is_last:
            bucket.unmark()
        for name in store_contents.to_release(here, bucket.there):
            (rank_folder(self._folder, self._rank) / name).unlink(missing_ok=True)
        return not self.left()

    def left(self) -> list[str]:
        """Files that have not arrived."""
        return [name for name, size in self._files().items() if self._bucket.there.get(name) != size]

    def _meet(self) -> None:
        """The first answer of the store: whether the run there is this one, and whether it has gone on elsewhere."""
        own, there = read_manifest(self._folder), self._bucket.manifest()
        if not self._joined and own.segments and there is not None and there.created != own.created:
            before = self._bucket.home
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(own.created))
            self._bucket.home = BucketPath(f"{before}-{stamp}")
            now = self._bucket.home
            self._tell(f"{before} holds another run, which could not be read at the start: this one is {now}")
        elif there is not None and _newest(there) > _newest(own):
            self._manifest_sent = self._manifest_version()
        self._joined = True
        self._bucket.look()

    def _send_manifest(self) -> None:
        """Rank 0's whenever it has changed; another's where there is none: rank 0 may not be watched."""
        file, version = self._folder / MANIFEST, self._manifest_version()
        if version is None or version == self._manifest_sent:
            return
        if self._rank == 0 or self._bucket.manifest() is None or not read_manifest(self._folder).segments:
            self._go_on()
            self._bucket.send_manifest(file)
            self.arrived += 1
        self._manifest_sent = version

    def _manifest_version(self) -> int | None:
        file = self._folder / MANIFEST
        return file.stat().st_mtime_ns if file.exists() else None

    def _send(self, name: str) -> None:
        self._go_on()
        file = rank_folder(self._folder, self._rank) / name
        try:
            self._bucket.send(file, name, holds_replay=store_contents.is_bulk(name) and holds_replay(file))
        except FileNotFoundError:  # merged into another, or dropped, since it was listed
            return
        self.arrived += 1

    def _send_journals(self, *, is_last: bool) -> None:
        now = time.monotonic()
        here = self._files()
        for name in store_contents.open_journals(here):
            size, at = self._journals.get(name, (-1, -float("inf")))
            due = max(self._pace.journal, here[name] / self._pace.bytes_a_second)
            if here[name] != size and (is_last or now - at >= due):
                self._send(name)
                self._journals[name] = (self._bucket.there.get(name, -1), now)

    def _clear_store(self, *, age: float) -> None:
        """Delete what another part stands for, once nobody is about to read it, and what is over the budget."""
        bucket, since, now = self._bucket, self._useless, time.monotonic()
        useless = store_contents.useless(bucket.there)
        useless |= store_contents.dropped_journals(self._journals.keys() & bucket.there.keys(), self._files())
        for name in list(since):
            if name not in useless:
                del since[name]
        for name in useless:
            if now - since.setdefault(name, now) >= age:
                self._delete(name)
        for name in list(store_contents.over_budget(bucket.there, bucket.held.values(), self._budget)):
            self._delete(name)
            (rank_folder(self._folder, self._rank) / name).unlink(missing_ok=True)
            if not self._was_dropped:
                self._was_dropped = True
                self._tell(
                    f"The run in {self._bucket.home} has reached its disk budget: the oldest statistics of ops and "
                    "gradients are deleted from here on, everything else is kept. Give a larger disk_budget to keep "
                    "more."
                )

    def _delete(self, name: str) -> None:
        self._go_on()
        self._bucket.delete(name)

    def _mark(self) -> None:
        now = time.monotonic()
        if now - self._marked >= self._pace.mark:
            self._bucket.mark()
            self._marked = now

    def _go_on(self) -> None:
        """Before each change: after a stall that was waited for in vain, the spool and the run may be another's."""
        if self.is_abandoned:
            raise RunUnreachable(f"{self._bucket.home} was given up.")

    # -- what is where -------------------------------------------------------------------------------------------

    def _files(self) -> dict[str, int]:
        """Bytes of each file of the rank's folder, by its path from there."""
        own = rank_folder(self._folder, self._rank)
        found = {}
        for path in own.glob("*/*"):
            if not path.name.startswith(".") and not path.name.endswith(TEMPORARY_SUFFIX):
                with suppress(FileNotFoundError):
                    found[path.relative_to(own).as_posix()] = path.stat().st_size
        return found

    def conflicts(self) -> list[str]:
        """Files of which the store holds others under the same names; told once."""
        found = store_contents.conflicting(self._files(), self._bucket.there)
        if found and not self._was_in_conflict:
            self._was_in_conflict = True
            self._tell(
                f"{self._bucket.home} holds other rows under the names of {len(found)} parts in {self._folder}: the "
                "run has gone on from elsewhere. They are left there."
            )
        return found


def _newest(manifest: Manifest) -> float:
    """When the last segment began, unix time."""
    return max((segment.started for segment in manifest.segments), default=0.0)


#: As much as the store may take: what is left over was kept within the run's own budget.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class SpoolResult:
    """The result of sending what was left in a spool."""

    spool: Path
    home: BucketPath
    files: int  #: that were sent
    left: int  #: that were not
    why: str = ""  #: they were not


def send_left(
    folder: Path, tell: Callable[[str], None], *, opened: Callable[[BucketPath], Store] | None = None
) -> SpoolResult:
    """Seal what is left in a spool, send it, and take away what has arrived.

    Args:
        folder: The spool.
        tell: Takes a line for the user.
        opened: Opens the store of a run.

    Raises:
        AmpscopeError: it is no spool, or a process is writing it.
        OSError: it cannot be read.
    """
    home = spool.home_of(folder)
    if home is None:
        raise AmpscopeError(f"{folder} is no spool: ampscope.watch names it when something could not be sent.")
    files = left = 0
    why = ""
    for rank in ranks(folder):
        lock = _locked(folder, rank)
        try:
            for journal in [path for table in Table for path in sweep(table_folder(folder, rank, table))]:
                seal(journal)
            store = opened or (lambda home: new_store(home.scheme))
            bucket = Bucket(home, rank, lambda: store(home))  # noqa: B023  # it is called in this round
            sync = SpoolSync(folder, bucket, rank, budget=_NO_LIMIT, tell=tell, joined=False, pace=Pace())
            try:
                whole = sync.look(is_last=True)
            except RunError as error:
                whole, why = False, str(error)
            files += sync.arrived
            left += len(sync.left())
            why = why or "; ".join(sync.conflicts()[:1])
            if whole:
                spool.clear(folder, rank)
        finally:
            lock.release()
    return SpoolResult(folder, home, files, left, why)


def _locked(folder: Path, rank: int) -> FolderLock:
    try:
        return FolderLock(rank_folder(folder, rank))
    except BlockingIOError:
        raise AmpscopeError(f"{folder} is being written: what is in it is sent while its training goes on.") from None
