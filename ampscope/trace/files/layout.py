"""Defines the layout of a run's folder: ``RUN/rank=K/TABLE/part-N.parquet`` and ``journal-N.arrow``.

A part may hold the rows of several numbers (``part-A-B.parquet``), and fewer values than were written
(``part-A-B.thinned-L.parquet``). It stands in the place of every part and journal of these numbers that still lies
beside it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ampscope.trace.location import folders_in, names_in
from ampscope.trace.schema import Table

_RANK = re.compile(r"rank=(0|[1-9][0-9]{0,5})")
_PART = re.compile(r"part-([0-9]{1,15})(?:-([0-9]{1,15}))?(?:\.thinned-([1-9]))?\.parquet")
_JOURNAL = re.compile(r"journal-([0-9]{1,15})\.arrow")
#: Ranks that a run may have; no job has had more.
MOST_RANKS = 1 << 17
#: What a file is called until it is whole; nobody reads it under this name.
TEMPORARY_SUFFIX = ".tmp"


class Span(NamedTuple):
    """A part's name, parsed: the numbers whose rows it holds, both ends among them, and how thinned they are."""

    first: int
    last: int
    level: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one table of one rank, by number; a part by the first of its numbers."""

    parts: dict[int, Path]
    journals: dict[int, Path]
    superseded: tuple[Path, ...] = ()  #: parts whose rows another one holds, too

    @property
    def open_journals(self) -> list[Path]:
        """Journals that are not sealed yet, oldest first; one whose part exists has only not been deleted."""
        sealed = _held(self.parts, self.journals)
        return [path for number, path in self.journals.items() if number not in sealed]

    @property
    def sealed_journals(self) -> list[Path]:
        """Journals whose rows a part holds."""
        waiting = set(self.open_journals)
        return [path for path in self.journals.values() if path not in waiting]

    @property
    def next_number(self) -> int:
        """The number of the next journal."""
        newest = max(self.parts, default=None)
        last = -1 if newest is None else span_of(self.parts[newest]).last
        return max((last, *self.journals)) + 1

    def joined(self, later: Listing) -> Listing:
        """Returns the listing of the files that lay there in either of two looks and had begun by the first."""
        if later is self:  # of a folder long at rest, or a table of thousands of parts would be sorted at each look
            return self
        end = self.next_number
        since = {path: None for number, path in later.parts.items() if number < end}
        parts, superseded = _standing([*self.parts.values(), *since])
        return Listing(parts, self.journals, superseded)


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


def span_path(folder: Path, span: Span) -> Path:
    """The part of a table's folder that holds these numbers."""
    numbers = f"{span.first:06d}" if span.last == span.first else f"{span.first:06d}-{span.last:06d}"
    thinned = f".thinned-{span.level}" if span.level else ""
    return folder / f"part-{numbers}{thinned}.parquet"


def span_of(part: Path) -> Span:
    """Parses the name of a part."""
    span = _span(part.name)
    if span is None:
        raise ValueError(f"{part} is not a part: expected a name like part-000000.parquet")
    return span


def ranks(run: Path) -> list[int]:
    """The ranks that have written into the run, ascending; up to `MOST_RANKS`, what is no folder is none."""
    matches = map(_RANK.fullmatch, folders_in(run))
    return sorted(int(match[1]) for match in matches if match and int(match[1]) < MOST_RANKS)


def list_table(folder: Path) -> Listing:
    """Lists the files in a table's folder now; empty when there is none."""
    try:
        return listing_of(folder, names_in(folder))
    except FileNotFoundError:
        return NOTHING


def listing_of(folder: Path, files: Iterable[str]) -> Listing:
    """Returns the listing that the names of a table folder's files make."""
    names = sorted(files)
    parts, superseded = _standing([folder / name for name in names if _span(name) is not None])
    return Listing(parts, _journals(folder, names), superseded)


def _span(name: str) -> Span | None:
    match = _PART.fullmatch(name)
    if match is None:
        return None
    first = int(match[1])
    span = Span(first, int(match[2] or first), int(match[3] or 0))
    return span if span.last >= first else None


def _standing(parts: Iterable[Path]) -> tuple[dict[int, Path], tuple[Path, ...]]:
    """The parts that count, by their first number, and those whose rows another one holds."""
    spans = sorted((span.first, -span.last, -span.level, path) for path in parts for span in [span_of(path)])
    standing: dict[int, Path] = {}
    superseded = []
    end = -1  # the last number that is held
    for first, negative_last, _, path in spans:
        if -negative_last <= end:
            superseded.append(path)
        else:
            standing[first] = path
            end = -negative_last
    return standing, tuple(superseded)


def _held(parts: dict[int, Path], numbers: Iterable[int]) -> frozenset[int]:
    """Returns those of ``numbers`` whose rows a part holds."""
    firsts = sorted(parts)
    near = ((number, bisect_right(firsts, number) - 1) for number in numbers)
    return frozenset(number for number, place in near if place >= 0 and number <= span_of(parts[firsts[place]]).last)


def _journals(folder: Path, names: list[str]) -> dict[int, Path]:
    return {int(match[1]): folder / name for name in names if (match := _JOURNAL.fullmatch(name))}
