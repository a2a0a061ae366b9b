"""Plans what is sent of a rank's spool, and what is deleted in the store; pure, by names and sizes.

The names alone tell which part stands in the place of which others (`ampscope.trace.files.layout`), in the store as on
a disk, so nothing has to be remembered from one process to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ampscope.trace.files.layout import Listing, listing_of
from ampscope.trace.files.saved_operands import FOLDER
from ampscope.trace.schema import BULK_TABLES, Table

#: The tables whose parts leave the spool once they have arrived: no part of theirs is merged or thinned.
_BULK = frozenset(table.value for table in BULK_TABLES)


class Held(NamedTuple):
    """A part of a bulk table in the store."""

    name: str
    size: int
    holds_replay: bool
    written: float


def listings(names: Iterable[str]) -> dict[str, Listing]:
    """The tables among the files of a rank, by name; files are named by their paths from the rank's folder."""
    by_table: dict[str, list[str]] = {table.value: [] for table in Table}
    for name in names:
        folder, _, file = name.partition("/")
        if folder in by_table:
            by_table[folder].append(file)
    return {table: listing_of(Path(table), files) for table, files in by_table.items() if files}


def to_send(here: Mapping[str, int], there: Mapping[str, int]) -> list[str]:
    """Sealed files that are not in the store yet: what a verdict needs first, then the bulk, oldest first."""
    waiting = [
        str(part) for listing in listings(here).values() for part in listing.parts.values() if str(part) not in there
    ]
    waiting.sort(key=lambda name: (name.partition("/")[0] in _BULK, Path(name).name, name))
    return waiting + sorted(name for name in here if name.startswith(f"{FOLDER}/") and name not in there)


def conflicting(here: Mapping[str, int], there: Mapping[str, int]) -> list[str]:
    """Sealed files of which the store holds another of the same name: the run has gone on elsewhere."""
    sealed = {str(part) for listing in listings(here).values() for part in listing.parts.values()}
    return sorted(name for name in sealed if name in there and there[name] != here[name])


def open_journals(here: Iterable[str]) -> list[str]:
    """Journals whose rows no part holds yet, small tables first."""
    found = [str(journal) for listing in listings(here).values() for journal in listing.open_journals]
    return sorted(found, key=lambda name: (name.partition("/")[0] in _BULK, name))


def useless(there: Iterable[str]) -> set[str]:
    """Returns the files in the store that another part stands for."""
    return {
        str(path) for listing in listings(there).values() for path in (*listing.superseded, *listing.sealed_journals)
    }


def dropped_journals(sent: Iterable[str], here: Iterable[str]) -> set[str]:
    """Journals that were sent, and whose rows are here no more: their part was dropped before it could be sent."""
    left = listings([*here, *sent])
    ours = {str(path) for listing in listings(here).values() for path in listing.journals.values()}
    return {name for listing in left.values() for name in map(str, listing.open_journals) if name not in ours}


def to_release(here: Mapping[str, int], there: Mapping[str, int]) -> list[str]:
    """Parts of bulk tables that have arrived, but the newest of each table, which tells the next number."""
    return [
        str(part)
        for table, listing in listings(here).items()
        if table in _BULK
        for part in list(listing.parts.values())[:-1]
        if there.get(str(part)) == here[str(part)]
    ]


def over_budget(there: Mapping[str, int], held: Iterable[Held], budget: int) -> Iterator[str]:
    """The parts of bulk tables that go, live traces and gradients first, until all takes no more than ``budget``.

    The newest of each table stays: it tells the next number.
    """
    excess = sum(there.values()) - budget
    newest = {str(list(listing.parts.values())[-1]) for listing in listings(there).values() if listing.parts}
    for part in sorted(
        (each for each in held if each.name not in newest),
        key=lambda each: (each.holds_replay, each.written, each.name),
    ):
        if excess <= 0:
            return
        excess -= part.size
        yield part.name


def is_bulk(name: str) -> bool:
    """Whether a file is a part of a bulk table."""
    return name.partition("/")[0] in _BULK and name.endswith(".parquet")
