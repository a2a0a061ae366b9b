"""The files of runs in an object store as the query engine opens them: those, and no others of the store."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from fsspec.spec import AbstractFileSystem

from ampscope.trace.location import BucketPath
from ampscope.trace.object_store import RangedFile


class RunFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Answers DuckDB's calls to a file system from a run's listing, and from blocks that are kept.

    Args:
        runs: The runs below which files may be read, of one store.
    """

    cachable = False

    def __init__(self, runs: Collection[BucketPath]) -> None:
        super().__init__()
        self.protocol = next(iter(runs)).scheme
        self._runs = frozenset(runs)

    def open(self, path: str, mode: str = "rb", **_: Any) -> RangedFile:
        """Opens a part of a run for reading."""
        if mode != "rb":
            raise PermissionError(f"{path} is only read")
        return self._inside(path).open_ranged()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Returns the size of a part."""
        return {"name": path, "size": self._inside(path).stat().st_size, "type": "file"}

    def modified(self, path: str) -> datetime:
        """Returns when a part was written."""
        return datetime.fromtimestamp(self._inside(path).stat().st_mtime, UTC)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether a part is there."""
        return self._inside(path).is_file()

    def glob(self, path: str, **_: Any) -> list[str]:
        """Returns the path itself if it is a file: the engine is given whole names."""
        return [path] if self._inside(path).is_file() else []

    def _inside(self, path: str) -> BucketPath:
        found = BucketPath(path)
        if ".." in found.parts or self._runs.isdisjoint(found.parents):
            raise PermissionError(f"{path} lies outside of the runs")
        return found
