"""The files of one run in an object store as the query engine opens them: those, and no others of the store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fsspec.spec import AbstractFileSystem

from ampscope.trace.remote.location import BucketPath
from ampscope.trace.remote.ranged_file import RangedFile


class RunFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """What DuckDB asks a file system for; all of it is answered from the run's listing, and blocks that are kept.

    Args:
        run: The run below which files may be read.
    """

    cachable = False

    def __init__(self, run: BucketPath) -> None:
        super().__init__()
        self.protocol = run.scheme
        self._run = run

    def open(self, path: str, mode: str = "rb", **_: Any) -> RangedFile:
        """A part of the run, to be read."""
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
        if ".." in found.parts or not found.is_relative_to(self._run):
            raise PermissionError(f"{path} lies outside of the run")
        return found
