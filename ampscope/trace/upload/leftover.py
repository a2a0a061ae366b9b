"""Sending what a process that died, or a network that was down, has left in a spool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ampscope.errors import AmpscopeError, RunError
from ampscope.trace.files.folder_lock import FolderLock
from ampscope.trace.files.layout import rank_folder, ranks, table_folder
from ampscope.trace.remote.location import BucketPath
from ampscope.trace.remote.store import Store, new_store
from ampscope.trace.schema import Table
from ampscope.trace.upload import spool
from ampscope.trace.upload.bucket import Bucket
from ampscope.trace.upload.sync import Pace, SpoolSync
from ampscope.trace.write.sealing import seal, sweep

#: As much as the store may take: what is left over was kept within the run's own budget.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of sending what was left in a spool."""

    spool: Path
    home: BucketPath
    files: int  #: that were sent
    left: int  #: that were not
    why: str = ""  #: they were not


def send_left(
    folder: Path, tell: Callable[[str], None], *, opened: Callable[[BucketPath], Store] | None = None
) -> Sent:
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
    return Sent(folder, home, files, left, why)


def _locked(folder: Path, rank: int) -> FolderLock:
    try:
        return FolderLock(rank_folder(folder, rank))
    except BlockingIOError:
        raise AmpscopeError(f"{folder} is being written: what is in it is sent while its training goes on.") from None
