"""Fetches from the store what a further segment of a run needs of the earlier ones, before it begins or not at all."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ampscope.errors import RunError, RunUnreachable
from ampscope.trace.files.layout import rank_folder
from ampscope.trace.manifest import manifest_from, read_manifest
from ampscope.trace.remote.location import BucketPath
from ampscope.trace.remote.store import ObjectState, Store
from ampscope.trace.schema import BULK_TABLES, MANIFEST
from ampscope.trace.upload.plan import listings

#: Seconds that the beginning of a training waits for the store.
PATIENCE_S = 60.0
_BULK = frozenset(table.value for table in BULK_TABLES)
_Answer = TypeVar("_Answer")


class Fetch:
    """Brings one rank's part of a run into its spool. After `join` returned False nothing of it will come any more.

    Args:
        home: The run.
        spool: Where it is written from here on.
        rank: Which.
        opened: Opens the store.
    """

    def __init__(self, home: BucketPath, spool: Path, rank: int, opened: Callable[[], Store]) -> None:
        self._home, self._spool, self._rank, self._opened = home, spool, rank, opened
        self._aside = spool / f".fetching-{os.getpid()}-{rank}"
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="ampscope-fetch", daemon=True)

    def join(self, patience: float = PATIENCE_S) -> str:
        """Fetch; why that was not possible, nothing where it was."""
        self._thread.start()
        self._thread.join(patience)
        if self._thread.is_alive():
            return f"{self._home} did not answer within {patience:.0f} seconds"
        try:
            if self._failure is not None:
                return str(self._failure).rstrip(". ")
            self._put_in_place()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
        return ""

    def _work(self) -> None:
        try:
            self._bring()
        except (RunError, OSError) as error:
            self._failure = error

    def _bring(self) -> None:
        store = self._opened()
        folder = f"{self._home}/rank={self._rank}"
        with suppress(FileNotFoundError):
            self._write(MANIFEST, _twice(store.read, f"{self._home}/{MANIFEST}"))
        there = _twice(store.tree, folder)
        for name in _needed(there):
            if not (rank_folder(self._spool, self._rank) / name).exists():  # what was left here is as long, or longer
                self._write(f"rank={self._rank}/{name}", _twice(store.read, f"{folder}/{name}"))

    def _write(self, name: str, content: bytes) -> None:
        path = self._aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def _put_in_place(self) -> None:
        own = self._aside / f"rank={self._rank}"
        for path in sorted(own.rglob("*")) if own.is_dir() else ():
            if path.is_file():
                place = self._spool / path.relative_to(self._aside)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
        manifest = self._aside / MANIFEST
        if manifest.exists() and self._is_newer(manifest):
            manifest.replace(self._spool / MANIFEST)

    def _is_newer(self, manifest: Path) -> bool:
        """Whether the store's manifest tells more than the spool's, another rank's here or one of a run cut short."""
        there = manifest_from(self._home / MANIFEST, manifest.read_bytes())
        try:
            here = read_manifest(self._spool)
        except RunError:
            return True
        return len(there.segments) > len(here.segments)


def _needed(there: dict[str, ObjectState]) -> list[str]:
    """All of the small tables, which are merged and counted on; of others the newest part, for its number."""
    found: list[str] = []
    for table, listing in listings(there).items():
        parts = list(map(str, listing.parts.values()))
        found += parts[-1:] if table in _BULK else parts
        found += map(str, listing.open_journals)
    return found


def _twice(ask: Callable[[str], _Answer], url: str) -> _Answer:
    """An answer of the store, asked again at once where it failed: a library's own second try draws random numbers."""
    try:
        return ask(url)
    except RunUnreachable:
        return ask(url)
