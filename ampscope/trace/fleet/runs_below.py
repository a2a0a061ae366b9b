"""The runs below folders, at any depth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ampscope.trace.schema import MANIFEST


def runs_below(folders: Iterable[Path]) -> list[Path]:
    """The folders that hold a run, each once, by path. A folder that cannot be listed is passed over."""
    return sorted({run for folder in folders for run in _below(folder)})


def _below(folder: Path) -> Iterator[Path]:
    for path, inner, files in os.walk(folder.resolve()):
        if MANIFEST in files:
            inner.clear()  # no run lies in another
            yield Path(path)
