"""A framework's run gets a folder beside what the framework logs, and ends with its verdict in one line."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ampscope
from ampscope.capture.record.run_folder import this_job
from ampscope.capture.torch_support import process_group
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.trace.read.find import from_here
from ampscope.trace.schema import MANIFEST

NAME = "ampscope"
_begun: Counter[Path] = Counter()  # runs that this process has asked for, by where


def run_folder(home: str | os.PathLike[str], *, resume: bool = False, name: str = NAME) -> Path:
    """The folder of a run below ``home``: ``name``, or the next number where an earlier run has that name.

    Of several ranks, the first that asks says which, and the others find that in the store of the process group: no
    rank waits for another, as long as all ask as often.

    Args:
        home: Where the framework puts its logs; the same on every rank.
        resume: Whether the training goes on from a checkpoint of the newest run that is there.
        name: What the first run is called.
    """
    home = Path(home).absolute()
    count, _begun[home] = _begun[home], _begun[home] + 1
    folders = [home / (f"{name}-{number}" if number else name) for number in range(1000)]
    taken = [folder for folder in folders if holds_run(folder)]
    if resume and taken:
        chosen = max(taken, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
    else:
        chosen = next((folder for folder in folders if folder not in taken), folders[0])
    if this_job().is_alone or not process_group.is_joined():
        return chosen
    return home / (process_group.agreed(f"ampscope/run/{home}/{count}", chosen.name) or chosen.name)


def holds_run(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a run in ``folder``."""
    return (Path(folder) / MANIFEST).is_file()


def verdict_line(folder: Path) -> str:
    """Returns one line with the verdict of ``ampscope diagnose`` on the run in ``folder``, and how to see the rest.

    Where the run cannot be diagnosed, the line says why: the training has ended well all the same.
    """
    look = f"Look: ampscope diagnose {from_here(folder)}"
    with Suppressed() as suppressed:
        diagnosis = ampscope.diagnose(folder)
        return f"{diagnosis.verdict.replace('_', ' ')}: {diagnosis.summary} {look}"
    return f"the run has no verdict ({suppressed.error}). {look}"


def calling(wanted: Callable[[object], bool]) -> Any | None:
    """The innermost object, among those whose methods are running now, that is ``wanted``; None where none is."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        thing = frame.f_locals.get("self")
        if thing is not None and wanted(thing):
            return thing
        frame = frame.f_back
    return None
