"""The runs below folders, at any depth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ampscope.trace.remote.location import BucketPath, location
from ampscope.trace.remote.runs_below import runs_below as runs_in_store
from ampscope.trace.schema import MANIFEST

#: Of folders in an object store, of which each level is a request or more.
_LEVELS = 16


def runs_below(folders: Iterable[Path]) -> list[Path]:
    """The folders that hold a run, each once, by path. A folder that cannot be listed is passed over.

    Args:
        folders: Where to look; a URL may be among them, whose runs are looked for sixteen levels deep.

    Raises:
        RunUnreachable: an object store cannot be reached.
    """
    return sorted({run for folder in folders for run in _below(location(folder))})


def _below(folder: Path) -> Iterator[Path]:
    if isinstance(folder, BucketPath):
        yield from [folder] if (folder / MANIFEST).is_file() else runs_in_store(folder, levels=_LEVELS)
        return
    for path, inner, files in os.walk(folder.resolve()):
        if MANIFEST in files:
            inner.clear()  # no run lies in another
            yield Path(path)
