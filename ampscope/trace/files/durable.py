"""Files that are either whole or not there, also after a crash: write aside, fsync, rename, fsync the folder.

Windows neither renames onto a file nor removes one that somebody has open, a reader say, or a virus scanner.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ampscope.trace.files.layout import TEMPORARY_SUFFIX

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
