"""The files of runs in an object store as the query engine opens them: those, and no others of the store."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from fsspec.spec import AbstractFileSystem

from ampscope.trace.remote.location import BucketPath
from ampscope.trace.remote.ranged_file import RangedFile


class RunFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """What DuckDB asks a file system for; all of it is answered from a run's listing, and blocks that are kept.

    Args:
        runs: The runs below which files may be read, of one store.
    """

    cachable = False

    def __init__(self, runs: Collection[BucketPath]) -> None:
        super().__init__()
        self.protocol = next(iter(runs)).scheme
        self._runs = frozenset(runs)

    def open(self, path: str, mode: str = "rb", **_: Any) -> RangedFile:
        """A part of a run, to be read."""
        if mode != "rb":
            raise PermissionError(f"{path} is only read")
        return self._inside(path).open_ranged()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Its size."""
        return {"name": path, "size": self._inside(path).stat().st_size, "type": "file"}

    def modified(self, path: str) -> datetime:
        """When it was written."""
        return datetime.fromtimestamp(self._inside(path).stat().st_mtime, UTC)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether it is there."""
        return self._inside(path).is_file()

    def glob(self, path: str, **_: Any) -> list[str]:
        """Itself: the engine is given whole names."""
        return [path] if self._inside(path).is_file() else []

    def _inside(self, path: str) -> BucketPath:
        found = BucketPath(path)
        if ".." in found.parts or self._runs.isdisjoint(found.parents):
            raise PermissionError(f"{path} lies outside of the runs")
        return found
