"""Whether a run is still being written, from its manifest, its lock and the age of its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from ampscope.trace.files.folder_lock import is_locked
from ampscope.trace.files.layout import rank_folder, ranks
from ampscope.trace.manifest import Manifest
from ampscope.trace.remote.location import BucketPath

Status = Literal["open", "closed", "interrupted"]

#: Seconds without a new row after which a run on a file system without locks counts as interrupted.
_SILENCE_S = 120.0


def status_of(run: Path, manifest: Manifest) -> Status:
    """``open`` while a process writes the run, ``closed`` after, ``interrupted`` when it died before closing."""
    if manifest.closed is not None:
        return "closed"
    if not manifest.segments:  # written by other ranks alone
        return "open" if any(is_locked(rank_folder(run, rank)) for rank in ranks(run)) else "interrupted"
    if isinstance(run, BucketPath) or all(segment.locked for segment in manifest.segments[-1:]):
        return "open" if is_locked(rank_folder(run, 0)) else "interrupted"
    return "open" if time.time() - _last_change(run) < _SILENCE_S else "interrupted"


def _last_change(run: Path) -> float:
    return max((path.lstat().st_mtime for path in run.glob("rank=*/*/*")), default=0.0)
