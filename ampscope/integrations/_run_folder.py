"""Where a framework's run is put: beside what the framework logs, the same folder on every rank, asking nobody."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ampscope.trace.manifest import read_manifest
from ampscope.trace.schema import MANIFEST

NAME = "ampscope"
#: Unix time at which this process had come as far as importing an integration.
_HERE_SINCE = time.time()
#: Runs of this process; a new training gets a new one.
_used: set[Path] = set()


def run_folder(home: str | os.PathLike[str], *, resume: bool = False) -> Path:
    """The folder of a run below ``home``: ``ampscope``, or the next number where an earlier run has that name.

    The ranks of one job find the same folder without a word between them, for a run that began since this process did
    is the one that another rank of the job has begun.

    Args:
        home: Where the framework puts its logs.
        resume: Whether the training goes on from a checkpoint of the run that is there.
    """
    folders = [Path(home).absolute() / (NAME if number == 0 else f"{NAME}-{number}") for number in range(1000)]
    taken = [folder for folder in folders if (folder / MANIFEST).exists()]
    if resume and taken:
        chosen = max(taken, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
    else:
        chosen = next((folder for folder in folders if folder not in taken or _is_this_jobs(folder)), folders[0])
    _used.add(chosen)
    return chosen


def holds_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a run can be continued in ``folder``."""
    return (Path(folder) / MANIFEST).is_file()


def _is_this_jobs(folder: Path) -> bool:
    """Whether another rank of this job has begun the run in ``folder``."""
    if folder in _used or _world_size() == 1:
        return False
    return read_manifest(folder).created >= _HERE_SINCE


def _world_size() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
