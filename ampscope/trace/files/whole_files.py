"""A file is written whole or not at all, also in a crash, and only a regular one is opened.

Windows neither renames onto a file nor removes one that somebody has open, a reader say, or a virus scanner.

A folder from elsewhere may hold a FIFO, whose opening waits for a writer, or a device, which never ends.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from ampscope.trace.files.layout import TEMPORARY_SUFFIX
from ampscope.trace.location import BucketPath

_IS_WINDOWS = os.name == "nt"
#: How often a file that is open elsewhere is tried, and the seconds in between: readers have it open for moments.
_ATTEMPTS, _PAUSE_S = 40, 0.05


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file and give it the name ``path`` once it is safe on the disk.

    Raises:
        OSError: the disk refused; ``path`` is as it was before.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        write(temporary)
        _sync(temporary, os.O_RDWR)
        _give_name(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not _IS_WINDOWS:  # elsewhere a folder cannot be opened
        _sync(path.parent, os.O_RDONLY)


def remove(path: Path) -> bool:
    """Remove a file; one that is gone is no matter.

    Returns:
        False where it has to stay for now, for on Windows somebody has it open: whoever looks for such files later
        removes it.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        if not _IS_WINDOWS:
            raise
        return False
    return True


def _give_name(temporary: Path, path: Path) -> None:
    for _ in range(_ATTEMPTS if _IS_WINDOWS else 0):
        try:
            temporary.replace(path)
        except PermissionError:
            time.sleep(_PAUSE_S)
        else:
            return
    temporary.replace(path)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> BinaryIO:
    """The file, to be read.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    if isinstance(path, BucketPath):
        return cast(BinaryIO, path.open_ranged())
    _refuse_special(path.stat())  # opening a device can do something
    descriptor = os.open(path, _FLAGS)
    try:
        _refuse_special(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """The whole content of a file that holds no more than ``most`` bytes.

    Raises:
        OSError: it cannot be opened, or is no regular file, or is larger.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it is larger than the {most:,} bytes that are read of such a file")
    return content


def _refuse_special(state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise OSError("it is no regular file")
