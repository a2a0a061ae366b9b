"""Lists the folders of a run's tables, looked up often and read seldom: a large job has ten thousand of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ampscope.errors import RunDamaged
from ampscope.trace.files.layout import NOTHING, Listing, list_table, table_folder
from ampscope.trace.location import BucketPath
from ampscope.trace.schema import Table

#: Nanoseconds after which two changes of a folder cannot have the same age, on any file system.
_SETTLED_NS = 3_000_000_000

#: Looks at a table of which parts keep going while it is looked at.
_LOOKS = 20
R = TypeVar("R")

#: Name, size and age (ns) of each of a table's files.
Stamp = tuple[tuple[str, int, int], ...]


class TableFolders:
    """The folders of one run. A folder in which nothing came or went for a while is not read again.

    Args:
        run: The run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._root = str(run)
        self._is_remote = isinstance(run, BucketPath)
        self._listings: dict[str, tuple[int, Listing]] = {}
        self._sealed: dict[str, tuple[int, Stamp]] = {}

    def listing(self, rank: int, table: Table) -> Listing:
        """Returns the listing of the folder of one rank's table now."""
        return self._looked(rank, table)[2]

    def stamp(self, rank: int, table: Table) -> Stamp:
        """The state of a table: another one whenever rows were added or parts were dropped.

        A part is renamed into its place and never changes there, so where there is no journal the folder tells all.
        """
        folder, changed, listing = self._looked(rank, table)
        known = self._sealed.get(folder)
        if known is not None and known[0] == changed and not listing.journals:
            return known[1]
        stamp = tuple(_states(f"rank={rank}", listing))
        if _is_settled(changed):
            self._sealed[folder] = (changed, stamp)
        return stamp

    def _looked(self, rank: int, table: Table) -> tuple[str, int, Listing]:
        folder = f"{self._root}/rank={rank}/{table.value}"
        try:
            changed = self._changed(folder, rank, table)
        except FileNotFoundError:
            return folder, 0, NOTHING
        except OSError as error:
            raise _damaged(folder, error) from error
        known = self._listings.get(folder)
        if known is None or known[0] != changed or not _is_settled(changed):
            known = self._listings[folder] = (changed, _listed(table_folder(self._run, rank, table)))
        return folder, changed, known[1]

    def _changed(self, folder: str, rank: int, table: Table) -> int:
        if self._is_remote:
            return table_folder(self._run, rank, table).stat().st_mtime_ns
        return os.stat(folder).st_mtime_ns  # noqa: PTH116  # ten thousand paths take longer than the look


def _listed(folder: Path) -> Listing:
    try:
        return list_table(folder)
    except OSError as error:
        raise _damaged(folder, error) from error


def _damaged(folder: str | Path, error: OSError) -> RunDamaged:
    return RunDamaged(
        f"{folder} is no folder that can be read ({error.strerror or error}). Move it away and open the run again: "
        "the rest of it is intact."
    )


def _is_settled(changed: int) -> bool:
    return time.time_ns() - changed >= _SETTLED_NS


def _states(rank: str, listing: Listing) -> list[tuple[str, int, int]]:
    found = []
    for path in (*listing.parts.values(), *listing.journals.values()):
        with suppress(FileNotFoundError):  # sealed, or dropped by the budget, while this looks
            state = path.lstat()  # a link may lead in a circle
            found.append((f"{rank}/{path.name}", state.st_size, state.st_mtime_ns))
    return found


def steadily(look: Callable[[], R]) -> R:
    """Returns a look's result, looking again where a part was dropped by the budget or merged meanwhile."""
    for _ in range(_LOOKS - 1):
        try:
            return look()
        except FileNotFoundError:
            continue
    return look()
