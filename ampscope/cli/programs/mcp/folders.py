"""The folders that may be read, and the runs in them by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampscope.errors import RunNotFound
from ampscope.trace.read.find import find_runs, locate
from ampscope.trace.remote.location import location


class Folders:
    """Finds runs below some folders, and none elsewhere."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [root.resolve() for root in roots]

    def runs(self) -> list[Path]:
        """All runs, newest first within each folder."""
        return [run for root in self._roots for run in find_runs(root) if self._holds(run)]

    def run(self, name: str) -> Path:
        """The run that a name means: its path, or the path below one of the folders.

        Raises:
            RunNotFound: there is none of that name below the folders.
        """
        for root in self._roots:
            path = location(root / name) if "://" not in name else location(name)  # of an absolute path, itself
            if "\0" not in name and self._holds(path) and path.exists():
                found = locate(path)
                if self._holds(found):
                    return found
        raise RunNotFound(f"There is no run {name!r} below {', '.join(map(str, self._roots))}; list_runs names them.")

    def name(self, run: Path) -> str:
        """The shortest name that `run` understands."""
        for root in self._roots:
            if run.resolve().is_relative_to(root):
                return run.resolve().relative_to(root).as_posix()
        return str(run)

    def _holds(self, path: Path) -> bool:
        """Whether it lies below a folder once links are followed."""
        return any(path.resolve().is_relative_to(root) for root in self._roots)
