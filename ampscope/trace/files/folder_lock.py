"""The lock on a rank's folder admits one writer, and tells a reader a living writer from a dead one."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ampscope.trace.files.whole_files import open_regular
from ampscope.trace.location import BucketPath

if TYPE_CHECKING:
    from filelock import BaseFileLock


class PortableLock:
    """Held from `take` to `release`, or to the death of the process.

    Args:
        path: The file; made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: BaseFileLock | None = None

    def take(self) -> bool:
        """Take the lock; False where somebody holds it.

        Raises:
            OSError: the file cannot be made, the file system knows no locks, or filelock is not installed.
        """
        try:
            from filelock import FileLock, Timeout
        except ImportError as error:
            raise OSError("there are no locks without filelock") from error
        lock = FileLock(self._path, timeout=0, thread_local=False, is_singleton=False)
        try:
            lock.acquire()
        except Timeout:
            return False
        except NotImplementedError as error:
            raise OSError("the file system knows no locks") from error
        self._lock = lock
        return True

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        if self._lock is not None:
            self._lock.release(force=True)
            self._lock = None


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock; this looks by taking it for an instant.

    Raises:
        OSError: as `PortableLock.take`.
    """
    if not path.exists():
        return False
    probe = PortableLock(path)
    try:
        return not probe.take()
    finally:
        probe.release()


#: Whether the system has `fcntl.flock`; Windows does not.
_HAS_FLOCK = find_spec("fcntl") is not None
if _HAS_FLOCK:
    import fcntl

LOCK_FILE = ".writer.lock"  #: dotted, so that readers of a folder of Parquet files pass it over
#: Seconds after which a mark in an object store that was not made anew is one of a writer that is gone.
MARK_HOLDS_S = 180.0
_ATTEMPTS = 5
_PAUSE_S = 0.02
#: What the file says while the lock is held by who tidies up, and seconds that a writer waits for that.
_TIDYING = b"tidying"
_TIDYING_FILE = ".tidying.lock"
_PATIENCE_S = 60.0


class FolderLock:
    """Held from construction to `release`, or to the death of the process."""

    def __init__(self, folder: Path, *, tidying: bool = False) -> None:
        """Take the lock.

        Args:
            folder: The rank's.
            tidying: By who writes no rows and gives it back within moments: a writer that comes waits for that.

        Raises:
            OSError: the folder cannot be written, or another writer holds it (``BlockingIOError``).
        """
        self._lock = _Flock(folder) if _HAS_FLOCK else _Portable(folder)
        self.held = False  #: False where the file system knows no locks
        try:
            self.held = _taken(self._lock, folder)
        except BlockingIOError:
            self.release()
            raise
        if self.held:
            self._lock.tell(tidying=tidying)
        _open_locks.add(self)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        self._lock.release()
        _open_locks.discard(self)


def is_locked(folder: Path) -> bool:
    """Whether a living process writes here; False too where the file system knows no locks.

    In an object store there are none: who writes leaves a mark there, again and again.
    """
    if isinstance(folder, BucketPath):
        mark = (folder / LOCK_FILE).state()
        return mark is not None and time.time() - mark.written < MARK_HOLDS_S
    try:
        return _Flock.is_written(folder) if _HAS_FLOCK else _Portable.is_written(folder)
    except OSError:
        return False


def _taken(lock: _Flock | _Portable, folder: Path) -> bool:
    until = time.monotonic() + _PATIENCE_S
    attempts = 0
    while attempts < _ATTEMPTS:  # a reader's probe holds it for an instant
        try:
            if lock.take():
                return True
        except OSError:
            return False
        time.sleep(_PAUSE_S)
        attempts += not lock.is_tidied() or time.monotonic() > until
    raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing this run", str(folder))


class _Flock:
    """The system's lock on an open file, which says in it what it is held for."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)

    def take(self) -> bool:
        """False when someone else holds it. OSError: not supported there."""
        return self._descriptor is not None and _try_lock(self._descriptor, shared=False)

    def tell(self, *, tidying: bool) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, _TIDYING if tidying else b"")

    def is_tidied(self) -> bool:
        """Whether the lock, which somebody holds, is held by who tidies up."""
        return self._descriptor is not None and _says_tidying(self._descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @staticmethod
    def is_written(folder: Path) -> bool:
        with open_regular(folder / LOCK_FILE) as file:
            return not _try_lock(file.fileno(), shared=True) and not _says_tidying(file.fileno())


class _Portable:
    """The lock where there is no ``flock``; what it is held for is told by a second one."""

    def __init__(self, folder: Path) -> None:
        self._lock, self._tidying = PortableLock(folder / LOCK_FILE), PortableLock(folder / _TIDYING_FILE)
        self._tidying_path = folder / _TIDYING_FILE

    def take(self) -> bool:
        return self._lock.take()

    def tell(self, *, tidying: bool) -> None:
        if tidying:
            self._tidying.take()

    def is_tidied(self) -> bool:
        with suppress(OSError):
            return is_held(self._tidying_path)
        return False

    def release(self) -> None:
        self._tidying.release()
        self._lock.release()

    @staticmethod
    def is_written(folder: Path) -> bool:
        return is_held(folder / LOCK_FILE) and not is_held(folder / _TIDYING_FILE)


def _says_tidying(descriptor: int) -> bool:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, len(_TIDYING)) == _TIDYING


def _try_lock(descriptor: int, *, shared: bool) -> bool:
    """False when someone else holds it. OSError: not supported there."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_open_locks: set[FolderLock] = set()


def _forget_in_child() -> None:
    """A forked child must not keep its parent's lock alive."""
    for lock in list(_open_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
