"""One rank's part of a run in the store: what is there, what is still to be sent, and what is of no use any more.

The names alone tell which part stands in the place of which others (`ampscope.trace.files.layout`), in the store as on
a disk, so nothing has to be remembered from one process to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ampscope.trace.files.folder_lock import LOCK_FILE
from ampscope.trace.files.layout import Listing, listing_of
from ampscope.trace.files.saved_operands import FOLDER
from ampscope.trace.location import BucketPath
from ampscope.trace.manifest import Manifest, manifest_from
from ampscope.trace.object_store import Store
from ampscope.trace.schema import BULK_TABLES, MANIFEST, Table

#: The tables whose parts leave the spool once they have arrived: no part of theirs is merged or thinned.
_BULK = frozenset(table.value for table in BULK_TABLES)


class StoredPart(NamedTuple):
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


def over_budget(there: Mapping[str, int], held: Iterable[StoredPart], budget: int) -> Iterator[str]:
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


class Bucket:
    """One rank's files in the store. Every call may raise `RunUnreachable`, and then nothing is believed of it.

    Args:
        home: The run.
        rank: Whose part.
        opened: Opens the store anew, with the credentials of that moment.
    """

    def __init__(self, home: BucketPath, rank: int, opened: Callable[[], Store]) -> None:
        self.home = home
        self.there: dict[str, int] = {}  #: bytes of each file, by its path from the rank's folder
        self.held: dict[str, StoredPart] = {}  #: parts of bulk tables
        self.is_known = False
        self._rank = rank
        self._opened = opened
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The store, opened when it is first needed and after a failure."""
        if self._store is None:
            self._store = self._opened()
        return self._store

    def forget(self) -> None:
        """After a failure: credentials may have been renewed, connections are broken."""
        self._store = None

    def look(self) -> None:
        """List what is there."""
        found = self.store.tree(self._url(""))
        self.there = {name: state.size for name, state in found.items() if name != LOCK_FILE}
        self.held = {
            name: StoredPart(name, state.size, True, state.written) for name, state in found.items() if is_bulk(name)
        }  # what was written before is not read again: it counts as worth keeping
        self.is_known = True

    def manifest(self) -> Manifest | None:
        """The manifest that is there; None where there is none."""
        url = str(self.home / MANIFEST)
        try:
            return manifest_from(self.home / MANIFEST, self.store.read(url))
        except FileNotFoundError:
            return None

    def send(self, file: Path, name: str, *, holds_replay: bool = False) -> None:
        """Copy a file of the rank's folder.

        Raises:
            FileNotFoundError: it has been merged into another, or dropped, since it was listed.
        """
        with file.open("rb") as opened:  # what is appended to it meanwhile is not meant
            content = opened.read()
            written = file.stat().st_mtime
        self.store.write(content, self._url(name))
        self.there[name] = len(content)
        if is_bulk(name):
            self.held[name] = StoredPart(name, len(content), holds_replay, written)

    def send_manifest(self, file: Path) -> None:
        """Copy the manifest."""
        self.store.write(file.read_bytes(), str(self.home / MANIFEST))

    def delete(self, name: str) -> None:
        """Delete a file of the rank's folder."""
        self.store.delete([self._url(name)])
        self.there.pop(name, None)
        self.held.pop(name, None)

    def mark(self) -> None:
        """Tell readers that the run is being written."""
        self.store.write(b"", self._url(LOCK_FILE))

    def unmark(self) -> None:
        """Tell them that it no longer is."""
        self.store.delete([self._url(LOCK_FILE)])

    def _url(self, name: str) -> str:
        folder = f"{self.home}/rank={self._rank}"
        return f"{folder}/{name}" if name else folder
