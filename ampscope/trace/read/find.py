"""Finding runs below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ampscope.errors import RunDamaged, RunNotFound, RunTooNew
from ampscope.trace.manifest import read_manifest
from ampscope.trace.remote.location import BucketPath, location
from ampscope.trace.remote.runs_below import runs_below
from ampscope.trace.schema import MANIFEST

_LISTED = 5


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """The runs in ``folder`` or up to two levels below it, newest first; the folder alone if it is a run itself."""
    folder = location(folder)
    manifest = folder / MANIFEST
    if manifest.is_file() if isinstance(folder, BucketPath) else manifest.exists() and not manifest.is_dir():
        return [folder]
    begun = {run: created for run in sorted(_below(folder)) if (created := _created(run)) is not None}
    return sorted(begun, key=begun.__getitem__, reverse=True)


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
        raise RunNotFound(f"{path} {what}. Give the folder that ampscope.watch printed when the training started.")
    found = find_runs(path)
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunNotFound(
            f"There is no run in {path}, nor up to two levels below it: no {MANIFEST}. "
            "Give the folder that ampscope.watch printed when the training started."
        )
    listed = "".join(f"\n  {run}" for run in found[:_LISTED])
    more = f"\n  and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    raise RunNotFound(f"There are {len(found)} runs in {path}; name one of them (newest first):{listed}{more}")


def _below(folder: Path) -> Iterator[Path]:
    if isinstance(folder, BucketPath):
        yield from runs_below(folder)
        return
    for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        yield from (path.parent for path in folder.glob(pattern))


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
