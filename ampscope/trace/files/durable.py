"""Files that are either whole or not there, also after a crash: write aside, fsync, rename, fsync the folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ampscope.trace.files.layout import TEMPORARY_SUFFIX


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file and give it the name ``path`` once it is safe on the disk.

    Raises:
        OSError: the disk refused; ``path`` is as it was before.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        write(temporary)
        _sync(temporary, os.O_RDWR)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
