"""Object stores for tests: fsspec's own in memory, a folder of a run copied there, and what lies there then."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from ampscope.trace.files.folder_lock import LOCK_FILE


@contextmanager
def memory_bucket() -> Iterator[str]:
    """The URL of an empty place in memory, which is emptied again."""
    files, name = fsspec.filesystem("memory"), f"/bucket-{uuid.uuid4().hex[:8]}"
    try:
        yield f"memory:/{name}/runs"
    finally:
        if files.exists(name):
            files.rm(name, recursive=True)


def put_run(folder: Path, url: str) -> str:
    """Copy a run's folder to a URL, which is returned."""
    files = fsspec.filesystem(url.partition(":")[0])
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != LOCK_FILE:
            files.pipe_file(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return url


def objects(url: str) -> dict[str, bytes]:
    """All that lies below a URL."""
    files = fsspec.filesystem(url.partition(":")[0])
    files.invalidate_cache()
    root = files._strip_protocol(url)
    found = files.find(root) if files.exists(root) else []
    return {path.removeprefix(root).strip("/"): files.cat_file(path) for path in found}
