"""A file in an object store of which only the bytes that are asked for are fetched, in blocks that are kept a while.

A Parquet part is read from its footer and then column by column, and the footer more than once: by pyarrow, which
checks it, and by the database.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from itertools import groupby
from typing import Any

from ampscope.trace.remote.store import ObjectState, store_of

#: Bytes of a block, and of a file that is fetched whole.
BLOCK, WHOLE = 64 << 10, 256 << 10
#: Bytes that are kept of all files.
MOST_KEPT = 128 << 20

#: A file as it was written at one time, and the number of one of its blocks.
_Key = tuple[str, ObjectState, int]


class Blocks:
    """Blocks that were fetched lately, of all files; the oldest go first."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._size = 0
        self._known: OrderedDict[_Key, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, url: str, state: ObjectState, start: int, end: int) -> bytes:
        """Bytes of a file; blocks that are not known are fetched, neighbours in one request.

        Raises:
            FileNotFoundError: the file is gone, or another one by now.
            RunUnreachable: the store cannot be reached.
        """
        end = min(end, state.size)
        if start >= end:
            return b""
        if state.size <= WHOLE:
            first, last = 0, (state.size - 1) // BLOCK
        else:
            first, last = start // BLOCK, (end - 1) // BLOCK
        with self._lock:
            found = {number: self._take((url, state, number)) for number in range(first, last + 1)}
        missing = [number for number, block in found.items() if block is None]
        for _, run in groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            found |= self._fetch(url, state, numbers[0], numbers[-1])
        content = b"".join(found[number] or b"" for number in range(first, last + 1))
        return content[start - first * BLOCK : end - first * BLOCK]

    def _take(self, key: _Key) -> bytes | None:
        block = self._known.get(key)
        if block is not None:
            self._known.move_to_end(key)
        return block

    def _fetch(self, url: str, state: ObjectState, first: int, last: int) -> dict[int, bytes]:
        start, end = first * BLOCK, min((last + 1) * BLOCK, state.size)
        content = store_of(url.partition(":")[0]).read(url, start, end)
        if len(content) != end - start:
            raise FileNotFoundError(f"{url} has been written anew")
        blocks = {number: content[(number - first) * BLOCK :][:BLOCK] for number in range(first, last + 1)}
        with self._lock:
            for number, block in blocks.items():
                self._size += len(block) - len(self._known.pop((url, state, number), b""))
                self._known[url, state, number] = block
            while self._size > self._most:
                self._size -= len(self._known.popitem(last=False)[1])
        return blocks


_blocks = Blocks()


class RangedFile(io.RawIOBase):
    """An object, to be read like a file.

    Args:
        url: Which.
        state: What a listing says of it.
    """

    def __init__(self, url: str, state: ObjectState) -> None:
        super().__init__()
        self._url = url
        self._state = state
        self._at = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position, as in every file."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._state.size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads up to ``size`` bytes, all by default; never fewer than are there."""
        end = self._state.size if size is None or size < 0 else self._at + size
        content = _blocks.read(self._url, self._state, self._at, end)
        self._at += len(content)
        return content

    def readall(self) -> bytes:
        """Reads to the end."""
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        """Reads into a buffer; returns how many bytes."""
        view = memoryview(buffer).cast("B")
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)
