"""Which runs the app offers: those below the folders it was given, and nothing else on the disk."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from ampscope.report.safe_text import short
from ampscope.trace.read.run import find_runs
from ampscope.trace.remote.location import location

#: The variable that names folders with runs, separated as in PATH.
VARIABLE = "AMPSCOPE_RUNS"
_ENTRY = "streamlit_app.py"
#: What separates folders; the colon of a URL does not.
_SEPARATOR = re.compile(rf"{re.escape(os.pathsep)}(?!//)")
#: Seconds for which a look at the folders holds.
_TTL_S = 3


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder in which runs are looked for."""

    path: Path
    is_sample: bool = False


@dataclass(frozen=True, slots=True)
class OfferedRun:
    """A run that can be chosen; ``key`` names it in the page's address."""

    key: str
    path: Path
    is_sample: bool

    @property
    def label(self) -> str:
        """Its key, cut short, as the app writes it."""
        return f"{short(self.key, 70)} (sample)" if self.is_sample else short(self.key, 80)


def run_folders() -> tuple[RunFolder, ...]:
    """The folders of the command line, else of the environment, else ``./ampscope_runs``; then the samples."""
    named = _command_line() or _environment() or [Path("ampscope_runs")]
    samples = Path(__file__).resolve().parents[2] / "sample_logs"
    return (*(RunFolder(path.resolve()) for path in named), RunFolder(samples, is_sample=True))


def find_offered(folders: tuple[RunFolder, ...]) -> dict[str, OfferedRun]:
    """The runs in ``folders`` by key, the newest first within each folder and none twice.

    Links are passed over: what they lead to is on offer under its own name, or lies outside.
    """
    found: dict[str, OfferedRun] = {}
    paths: set[Path] = set()
    for folder in folders:
        root = folder.path.resolve()
        for path in find_runs(root) if root.is_dir() else ():
            where = path.resolve()
            if where in paths or where != path:
                continue
            paths.add(where)
            run = OfferedRun(_key(path, folder, found), path, folder.is_sample)
            found.setdefault(run.key, run)
    return found


@st.cache_resource(ttl=_TTL_S, show_spinner=False)
def offered_runs(folders: tuple[RunFolder, ...]) -> dict[str, OfferedRun]:
    """`find_offered`, at most three seconds ago."""
    return find_offered(folders)


def _key(path: Path, folder: RunFolder, taken: dict[str, OfferedRun]) -> str:
    """The run's path below its folder; the folder's name in front where that alone is taken."""
    relative = path.relative_to(folder.path.resolve()).as_posix()
    key = path.name if relative == "." else relative
    return key if key not in taken else f"{folder.path.name}/{key}"


def _command_line() -> list[Path]:
    """What follows ``--`` in ``streamlit run app -- FOLDER``."""
    if Path(sys.argv[0]).name != _ENTRY:
        return []
    return list(_paths(sys.argv[1:]))


def _environment() -> list[Path]:
    return list(_paths(_SEPARATOR.split(os.environ.get(VARIABLE, ""))))


def _paths(names: list[str]) -> Iterator[Path]:
    return (location(name).expanduser() for name in names if name)
