"""Runs are found below folders of this machine and of object stores, and have names."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ampscope.errors import RunDamaged, RunNotFound, RunTooNew
from ampscope.trace.location import BucketPath, location
from ampscope.trace.manifest import NAME_IT, read_manifest
from ampscope.trace.schema import MANIFEST

_STORE_LEVELS = 2
#: Requests at a time.
_AT_ONCE = 8


def runs_in_store(folder: BucketPath, *, levels: int = _STORE_LEVELS) -> list[BucketPath]:
    """The folders some levels below ``folder`` that hold a manifest; nothing is looked for inside a run.

    Args:
        folder: Where to look.
        levels: How deep.

    Raises:
        RunUnreachable: the store cannot be reached.
    """
    found: list[BucketPath] = []
    level = _folders_of([folder])
    for _ in range(levels):
        if not level:
            break
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            listed = dict(zip(level, pool.map(lambda each: each.store.children(str(each)), level), strict=True))
        runs = [each for each, children in listed.items() if any(child.name == MANIFEST for child in children)]
        found += runs
        level = [
            each / child.name
            for each, children in listed.items()
            if each not in runs
            for child in children
            if child.is_folder
        ]
    return found


def _folders_of(folders: Iterable[BucketPath]) -> list[BucketPath]:
    return [each / child.name for each in folders for child in each.store.children(str(each)) if child.is_folder]


_LISTED = 5
#: How deep `runs_around` looks: as deep as ``lightning_logs/version_0/ampscope``.
_LEVELS = 3
#: It may be a home folder that it looks around in: at most so many entries of each folder, and seconds.
_MOST_ENTRIES, _MOST_SECONDS = 5_000, 3.0
#: What the callbacks call a run beside a framework's own files: one run's name is like the next one's.
_BY_A_CALLBACK = re.compile(r"_?ampscope(-[0-9]+)?")


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """The runs in ``folder`` or up to two levels below it, newest first; the folder alone if it is a run itself."""
    folder = location(folder)
    manifest = folder / MANIFEST
    if manifest.is_file() if isinstance(folder, BucketPath) else manifest.exists() and not manifest.is_dir():
        return [folder]
    return _newest_first(_below(folder))


def runs_around(folder: Path) -> list[Path]:
    """The runs up to three levels below the folder in which somebody works, newest first.

    Hidden folders and links are passed over. A folder that is slow to look through is looked through in part.
    """
    return _newest_first(_around(folder))


def locate(path: Path) -> Path:
    """The folder of the one run that ``path`` means: itself, its manifest, or the only run below it.

    Raises:
        RunNotFound: there is none, or there are several.
    """
    if path.name == MANIFEST and path.is_file():
        return path.parent
    if isinstance(path, BucketPath) and (path / MANIFEST).is_file():
        return path
    if not path.is_dir():
        what = "is a file, not a run's folder" if path.exists() else "does not exist"
        raise RunNotFound(f"{path} {what}. {NAME_IT}")
    found = find_runs(path)
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunNotFound(f"There is no run in {path}, nor up to two levels below it: no {MANIFEST}. {NAME_IT}")
    listed = "".join(f"\n  {run}" for run in found[:_LISTED])
    more = f"\n  and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    raise RunNotFound(f"There are {len(found)} runs in {path}; name one of them (newest first):{listed}{more}")


def from_here(run: Path) -> str:
    """The folder as one names it in the working directory, where it lies below that; a bare name with ``./`` before."""
    with suppress(OSError, ValueError):  # the working directory is gone; the run lies elsewhere
        run = run.relative_to(Path.cwd())
    return f"./{run}" if str(run) == run.name else str(run)


def told_name(run: Path, name: str = "") -> str:
    """Returns a run's name for people: its folder's, with the folder around it where a callback gave that name.

    Args:
        run: Its folder.
        name: What the folder was called when the run began.
    """
    run = run.absolute()
    name = name or run.name
    around = run.parent.name
    return f"{around}/{name}" if around and _BY_A_CALLBACK.fullmatch(name) else name


def _below(folder: Path) -> Iterator[Path]:
    if isinstance(folder, BucketPath):
        yield from runs_in_store(folder)
        return
    for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        yield from (path.parent for path in folder.glob(pattern))


def _around(folder: Path) -> Iterator[Path]:
    end, level = time.monotonic() + _MOST_SECONDS, [folder]
    for _ in range(_LEVELS):
        level = [below for each in level if time.monotonic() < end for below in _folders_in(each)]
        yield from (each for each in level if time.monotonic() < end and _has_manifest(each))


def _has_manifest(folder: Path) -> bool:
    """Whether it holds a manifest; one that may not be looked into does not."""
    try:
        return (folder / MANIFEST).is_file()
    except OSError:
        return False


def _folders_in(folder: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, _MOST_ENTRIES):
            if not entry.name.startswith((".", "rank=")) and entry.is_dir(follow_symlinks=False):
                yield folder / entry.name


def _newest_first(runs: Iterable[Path]) -> list[Path]:
    begun = {run: created for run in sorted(runs) if (created := _created(run)) is not None}
    return sorted(begun, key=begun.__getitem__, reverse=True)


def _created(folder: Path) -> float | None:
    """When the run in a folder began; None where its manifest is none of ours: others write a ``run.json``, too."""
    try:
        return read_manifest(folder).created
    except RunNotFound:
        return None
    except RunDamaged:
        if not any(folder.glob("rank=*")):
            return None
    except RunTooNew:
        pass
    return (folder / MANIFEST).stat().st_mtime


#: Of folders in an object store, of which each level is a request or more.
_FLEET_LEVELS = 16


def runs_below(folders: Iterable[Path]) -> list[Path]:
    """The folders that hold a run, each once, by path. A folder that cannot be listed is passed over.

    Args:
        folders: Where to look; a URL may be among them, whose runs are looked for sixteen levels deep.

    Raises:
        RunUnreachable: an object store cannot be reached.
    """
    return sorted({run for folder in folders for run in _at_any_depth(location(folder))})


def _at_any_depth(folder: Path) -> Iterator[Path]:
    if isinstance(folder, BucketPath):
        yield from [folder] if (folder / MANIFEST).is_file() else runs_in_store(folder, levels=_FLEET_LEVELS)
        return
    for path, inner, files in os.walk(folder.resolve()):
        if MANIFEST in files:
            inner.clear()  # no run lies in another
            yield Path(path)
