"""A file that a verb was asked to write."""

from __future__ import annotations

from pathlib import Path

from ampscope.errors import AmpscopeError


def write(path: Path, content: bytes) -> None:
    """Whole or not at all: whoever waits for the file never finds a part of it.

    Raises:
        AmpscopeError: it cannot be written.
    """
    from ampscope.trace.files.durable import write_whole

    if path.is_dir():
        raise AmpscopeError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        write_whole(path, lambda temporary: _fill(temporary, content))
    except OSError as error:
        raise AmpscopeError(f"cannot write {path}: {error.strerror or error}") from None


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)
