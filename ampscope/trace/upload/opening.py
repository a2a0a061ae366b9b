"""The writer of a run is opened: into a folder, or by a spool into a store, with what is there of earlier segments."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ampscope.errors import RunError, RunUnreachable, WatchError
from ampscope.trace.files.layout import rank_folder
from ampscope.trace.location import BucketPath, location
from ampscope.trace.manifest import Manifest, manifest_from, read_manifest
from ampscope.trace.object_store import ObjectState, Store, new_store
from ampscope.trace.schema import BULK_TABLES, MANIFEST
from ampscope.trace.upload.spool import spool_of
from ampscope.trace.upload.store_contents import listings
from ampscope.trace.upload.uploader import Uploader
from ampscope.trace.write.writer import TraceWriter

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


def open_remote(
    home: BucketPath,
    *,
    manifest: Manifest,
    rank: int = 0,
    disk_budget: int = 2 << 30,
    on_notice: Callable[[str], None],
    **options: Any,
) -> TraceWriter:
    """A writer whose rows go to ``home``, and on from where the run there stands.

    Where the store does not answer, the run begins in the spool; what is there by the time it answers decides whether
    it goes on there or beside it.

    Args:
        home: The run in the store.
        manifest: As of a `TraceWriter`.
        rank: Likewise.
        disk_budget: Likewise; it holds for the spool and for the store.
        on_notice: Likewise; also told of the network.
        options: Further ones of a `TraceWriter`.

    Raises:
        RunUnreachable: there is no such kind of store, or what it needs is not installed.
        OSError: the spool cannot be written, or another process writes it.
        RunDamaged, RunTooNew: the run there cannot be gone on with.
    """
    new_store(home.scheme, tries=1)  # what is wrong with the URL is the caller's to mend
    spool = spool_of(home)
    why = Fetch(home, spool, rank, lambda: new_store(home.scheme, tries=1)).join()
    if why:
        on_notice(f"{why}. The run begins in {spool} and is sent when it can be.")
    uploader = Uploader(
        spool,
        home,
        rank,
        budget=disk_budget // max(manifest.world_size, 1),
        tell=on_notice,
        joined=not why,
    )
    return TraceWriter(
        spool,
        manifest=manifest,
        rank=rank,
        disk_budget=disk_budget,
        on_notice=on_notice,
        follower=uploader,
        **options,
    )


def named_folder(told: Any) -> Path:
    """Returns the folder of a run that was named by ``dir=``.

    Raises:
        WatchError: it is no path and no URL, or a URL that holds secrets.
    """
    try:
        folder = location(told)
    except TypeError:
        raise WatchError(f"dir={told!r}: give the path of the run's folder, or leave it out") from None
    except RunUnreachable as error:
        raise WatchError(str(error)) from error
    if "\0" in str(folder):
        raise WatchError(f"dir={told!r}: give the path of the run's folder, or leave it out")
    return folder


def open_writer(
    folder: Path, manifest: Manifest, rank: int, disk_budget: int, say: Callable[[object], None]
) -> TraceWriter:
    """The writer of a run; ``say`` takes its lines for the user.

    Raises:
        WatchError: It cannot be written there.
        RunError: What is there cannot be gone on with.
    """
    told: dict[str, Any] = {"on_notice": say, "on_failure": partial(_say_ended, folder, say)}
    try:
        if isinstance(folder, BucketPath):
            return open_remote(folder, manifest=manifest, rank=rank, disk_budget=disk_budget, **told)
        return TraceWriter(folder, manifest=manifest, rank=rank, disk_budget=disk_budget, **told)
    except RunUnreachable as error:
        raise WatchError(str(error)) from error
    except OSError as error:
        raise cannot_write(folder, error) from error


def _say_ended(folder: Path, say: Callable[[object], None], failure: BaseException) -> None:
    say(
        f"recording of the run in {folder} has ended: {str(failure) or type(failure).__name__}; training goes on, and "
        "what it does from here on is not known"
    )


def cannot_write(folder: Path, error: OSError) -> WatchError:
    """Makes the error that a folder cannot be written."""
    return WatchError(
        f"cannot write the run to {folder}: {error.strerror or error}; "
        f"pass dir= a folder that this process alone can write"
    )
