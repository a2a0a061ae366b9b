"""One rank's part of a run in the store: what is there, as far as this process knows, and what changes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ampscope.trace.files.folder_lock import LOCK_FILE
from ampscope.trace.manifest import Manifest, manifest_from
from ampscope.trace.remote.location import BucketPath
from ampscope.trace.remote.store import Store
from ampscope.trace.schema import MANIFEST
from ampscope.trace.upload.plan import Held, is_bulk


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
        self.held: dict[str, Held] = {}  #: parts of bulk tables
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
            name: Held(name, state.size, True, state.written) for name, state in found.items() if is_bulk(name)
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
            self.held[name] = Held(name, len(content), holds_replay, written)

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
