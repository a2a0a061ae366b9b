"""Where things lie in a run's folder: ``RUN/rank=K/TABLE/part-N.parquet`` and ``journal-N.arrow``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ampscope.trace.schema import Table

_RANK = re.compile(r"rank=(0|[1-9][0-9]{0,5})")
_PART = re.compile(r"part-([0-9]{1,15})\.parquet")
_JOURNAL = re.compile(r"journal-([0-9]{1,15})\.arrow")
#: Ranks that a run may have; no job has had more.
MOST_RANKS = 1 << 17
#: What a file is called until it is whole; nobody reads it under this name.
TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one table of one rank, by number."""

    parts: dict[int, Path]
    journals: dict[int, Path]

    @property
    def open_journals(self) -> list[Path]:
        """Journals that are not sealed yet, oldest first; one whose part exists has only not been deleted."""
        return [path for number, path in self.journals.items() if number not in self.parts]

    @property
    def next_number(self) -> int:
        """The number of the next journal."""
        return max((*self.parts, *self.journals), default=-1) + 1


#: What lies where there is no folder.
NOTHING = Listing(parts={}, journals={})


def rank_folder(run: Path, rank: int) -> Path:
    """The folder of one rank's tables."""
    return run / f"rank={rank}"


def table_folder(run: Path, rank: int, table: Table) -> Path:
    """The folder of one table of one rank."""
    return rank_folder(run, rank) / table.value


def journal_path(folder: Path, number: int) -> Path:
    """The journal ``number`` in a table's folder."""
    return folder / f"journal-{number:06d}.arrow"


def part_path(journal: Path) -> Path:
    """The Parquet part that a journal is sealed into."""
    match = _JOURNAL.fullmatch(journal.name)
    if match is None:
        raise ValueError(f"{journal} is not a journal: expected a name like journal-000000.arrow")
    return journal.with_name(f"part-{match[1]}.parquet")


def ranks(run: Path) -> list[int]:
    """The ranks that have written into the run, ascending; up to `MOST_RANKS`, what is no folder is none."""
    with os.scandir(run) as entries:
        matches = [_RANK.fullmatch(entry.name) for entry in entries if _is_folder(entry)]
    return sorted(int(match[1]) for match in matches if match and int(match[1]) < MOST_RANKS)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def list_table(folder: Path) -> Listing:
    """What lies in a table's folder now; empty when there is none."""
    try:
        with os.scandir(folder) as entries:  # names, not paths: a table of a long run has hundreds of parts
            names = sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return NOTHING
    return Listing(parts=_numbered(folder, names, _PART), journals=_numbered(folder, names, _JOURNAL))


def _numbered(folder: Path, names: list[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    return {int(match[1]): folder / name for name in names if (match := pattern.fullmatch(name))}
