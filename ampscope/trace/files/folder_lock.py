"""The lock on a rank's folder: one writer at a time, and a reader can tell a living writer from a dead one."""

from __future__ import annotations

import errno
import os
import sys
import time
import weakref
from pathlib import Path

from ampscope.trace.files.regular_file import open_regular

LOCK_FILE = ".writer.lock"  #: dotted, so that readers of a folder of Parquet files pass it over
_ATTEMPTS = 5
_PAUSE_S = 0.02


class FolderLock:
    """Held from construction to `release`, or to the death of the process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            OSError: the folder cannot be written, or another writer holds it (``BlockingIOError``).
        """
        self._descriptor: int | None = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        self.held = False  #: False where the file system knows no locks
        try:
            self.held = _lock(self._descriptor, folder)
        except BlockingIOError:
            self.release()
            raise
        _open_locks.add(self)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the lock; False too where the file system knows no locks."""
    try:
        with open_regular(folder / LOCK_FILE) as file:
            return not _try_lock(file.fileno(), shared=True)
    except OSError:
        return False


def _lock(descriptor: int, folder: Path) -> bool:
    for _ in range(_ATTEMPTS):  # a reader's probe holds it for an instant
        try:
            if _try_lock(descriptor, shared=False):
                return True
        except OSError:
            return False
        time.sleep(_PAUSE_S)
    raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing this run", str(folder))


if sys.platform == "win32":

    def _try_lock(descriptor: int, *, shared: bool) -> bool:
        raise OSError(errno.ENOTSUP, f"no advisory locks for {descriptor=}, {shared=}")

else:
    import fcntl

    def _try_lock(descriptor: int, *, shared: bool) -> bool:
        """False when someone else holds it. OSError: not supported there."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


_open_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child must not keep its parent's lock alive."""
    for lock in list(_open_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
