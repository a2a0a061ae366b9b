"""A note that recording has ended before the training did, on room that was taken while the disk still had some."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ampscope.trace.files.whole_files import read_regular

#: Below a rank's folder; nothing but blanks in it while nothing is wrong.
NAME = "recording-end.json"
_BYTES = 4096
#: Characters of an error that are kept, and how many ends are: each is a segment's.
_REASON, _MOST = 300, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingEnd:
    """Recording has ended, although the training may have gone on."""

    time: float  #: unix time, seconds
    why: str


class EndNote:
    """Takes the room, and writes into it without asking the disk for more.

    Args:
        folder: The rank's.

    Raises:
        OSError: There is no room.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._ends = recording_ends(folder)[-_MOST + 1 :]
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self._path, flags, 0o644)  # open from here on: the folder may become read-only
        self._write()

    def write(self, failure: BaseException) -> None:
        """Recording has ended by ``failure``."""
        why = (f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__)[:_REASON]
        self._ends = [*self._ends, RecordingEnd(time=time.time(), why=why)]
        with suppress(OSError):
            self._write()

    def close(self) -> None:
        """All is written; the file stays only where an end is told in it."""
        os.close(self._descriptor)
        if not self._ends:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        text = json.dumps([asdict(end) for end in self._ends]) if self._ends else ""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, text.encode().ljust(_BYTES))


def recording_ends(folder: Path) -> list[RecordingEnd]:
    """When and why recording ended early in a rank's folder, the first first; none where nothing tells of it."""
    try:
        told = json.loads(read_regular(folder / NAME, 2 * _BYTES) or b"[]")
        return [RecordingEnd(time=float(each["time"]), why=str(each["why"])) for each in told]
    except (OSError, ValueError, TypeError, KeyError):
        return []
