"""The one way in which a file of a trace is opened: a regular file, or a link to one, and nothing that could wait.

A folder from elsewhere may hold a FIFO, whose opening waits for a writer, or a device, which never ends.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

from ampscope.trace.remote.location import BucketPath

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
