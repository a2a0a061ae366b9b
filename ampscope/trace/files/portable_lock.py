"""A lock on a file where the system has no ``flock``, as on Windows: filelock's, which the install brings there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
