"""A file with other content, and what it was beside it; both whole, or neither."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from ampscope.errors import AmpscopeError


def replaced(path: Path, before: bytes, after: bytes) -> Path:
    """Puts other content into a file, and keeps a copy of what it was.

    Args:
        path: The file.
        before: What it holds.
        after: What it is to hold.

    Returns:
        The copy, beside the file, with ``.bak`` at its end.

    Raises:
        AmpscopeError: the file may not be written, or holds something else by now; it stays as it is.
    """
    if not _may_write(path):
        raise AmpscopeError(f"cannot write {path}: it is read-only; nothing was changed")
    kept = _copy(path, before)
    try:
        _exchange(path, before, after)
    except BaseException:
        kept.unlink()
        raise
    return kept


def _may_write(path: Path) -> bool:
    """Whether a file may be written; that its folder may be is enough to replace it, and not asked."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return bool(mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)) and os.access(path, os.W_OK)


def _copy(path: Path, content: bytes) -> Path:
    """Keeps a file's content beside it, under a name that was free; returns that path."""
    number = 0
    while True:
        kept = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            file = kept.open("xb")
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise AmpscopeError(f"cannot keep {path} as {kept}: {error.strerror or error}") from None
        try:
            with file:
                file.write(content)
            shutil.copymode(path, kept)
        except OSError as error:
            kept.unlink()
            raise AmpscopeError(f"cannot keep {path} as {kept}: {error.strerror or error}") from None
        return kept


def _exchange(path: Path, before: bytes, after: bytes) -> None:
    """The file with other content, all of it or as it was."""
    written = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".ampscope-", delete=False) as file:
            written = Path(file.name)
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, written)
        if path.is_symlink() or path.read_bytes() != before:
            raise AmpscopeError(f"{path} has changed meanwhile, so nothing was changed; run it again")
        written.replace(path)
        written = None
    except OSError as error:
        raise AmpscopeError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if written is not None:
            written.unlink(missing_ok=True)
