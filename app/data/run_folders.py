"""Finds the runs that the app offers: those below the folders it was given, and nothing else on the disk."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import streamlit as st

from ampscope.errors import RunUnreachable
from ampscope.report.safe_text import short
from ampscope.trace.location import location
from ampscope.trace.read.find import find_runs, runs_around, told_name

#: The variable that names folders with runs, separated as in PATH.
VARIABLE = "AMPSCOPE_RUNS"
_ENTRY = "streamlit_app.py"
_SAMPLES = Path(__file__).resolve().parents[2] / "sample_logs"
#: What separates folders; the colon of a URL does not.
_SEPARATOR = re.compile(rf"{re.escape(os.pathsep)}(?!//)")
#: Seconds for which a look at the folders holds, and for which a store that does not answer, slowly, is left alone.
_TTL_S, ASK_AGAIN_S = 3, 30


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder in which runs are looked for."""

    path: Path
    is_sample: bool = False
    is_around: bool = False  #: looked around in where no run is in the folders before it


@dataclass(frozen=True, slots=True)
class OfferedRun:
    """A run that can be chosen; ``key`` names it in the page's address."""

    key: str
    path: Path
    is_sample: bool

    @property
    def label(self) -> str:
        """The run's key, cut short, as the app writes it."""
        return f"{short(self.key, 70)} (sample)" if self.is_sample else short(self.key, 80)


def run_folders() -> tuple[RunFolder, ...]:
    """The folders of the command line, else of the environment, else those at hand; then the samples."""
    named = [RunFolder(path.resolve()) for path in _command_line() or _environment()]
    at_hand = [RunFolder(Path("ampscope_runs").resolve()), RunFolder(Path.cwd(), is_around=True)]
    return (*(named or at_hand), RunFolder(_SAMPLES, is_sample=True))


class FoundRuns(NamedTuple):
    """The runs found in folders at one moment, and the folders that could not be read."""

    runs: dict[str, OfferedRun]  #: by key
    unreachable: dict[RunFolder, str]  #: those in stores that cannot be used or do not answer, and why
    at: float  #: seconds of the monotonic clock when it was looked


def find_offered(folders: tuple[RunFolder, ...]) -> FoundRuns:
    """The runs in ``folders``, the newest first within each folder and none twice.

    Links are passed over: what they lead to is on offer under its own name, or lies outside.
    """
    found: dict[str, OfferedRun] = {}
    unreachable: dict[RunFolder, str] = {}
    paths: set[Path] = set()
    for folder in folders:
        if folder.is_around and found:
            continue
        try:
            below = _runs_around(folder.path) if folder.is_around else _runs_below(folder.path)
        except RunUnreachable as error:
            unreachable[folder] = str(error)
            continue
        for path in below:
            where = path.resolve()
            if where in paths or where != path:
                continue
            paths.add(where)
            run = OfferedRun(_key(path, folder, found), path, folder.is_sample)
            found.setdefault(run.key, run)
    return FoundRuns(found, unreachable, time.monotonic())


def _holds_still(found: FoundRuns) -> bool:
    return time.monotonic() - found.at < _TTL_S


# Not with `ttl`: Streamlit asks whether it has passed and then reads, and in between it may pass, as a KeyError.
@st.cache_resource(validate=_holds_still, show_spinner=False)
def _looked(folders: tuple[RunFolder, ...]) -> FoundRuns:
    """`find_offered`, at most three seconds ago."""
    return find_offered(folders)


def offered_runs(folders: tuple[RunFolder, ...]) -> dict[str, OfferedRun]:
    """The runs in ``folders`` by key."""
    return _looked(folders).runs


def unreachable_folders(folders: tuple[RunFolder, ...]) -> dict[RunFolder, str]:
    """Returns the folders of which nothing is known, and why."""
    return _looked(folders).unreachable


def _runs_around(path: Path) -> list[Path]:
    return [run for run in runs_around(path.resolve()) if not run.is_relative_to(_SAMPLES)]


def _runs_below(path: Path) -> list[Path]:
    silent, now = _silent_stores(), time.monotonic()
    since, why = silent.get(path, (now - ASK_AGAIN_S, ""))
    if now - since < ASK_AGAIN_S:
        raise RunUnreachable(why)
    try:
        root = path.resolve()
        return find_runs(root) if root.is_dir() else []
    except RunUnreachable as error:
        silent[path] = time.monotonic(), str(error)
        raise


@st.cache_resource(show_spinner=False)
def _silent_stores() -> dict[Path, tuple[float, str]]:
    """Holds for all sessions the folders in stores that did not answer, when, and why."""
    return {}


def _key(path: Path, folder: RunFolder, taken: dict[str, OfferedRun]) -> str:
    """The run's path below its folder; the folder's name in front where that alone is taken."""
    relative = path.relative_to(folder.path.resolve()).as_posix()
    key = relative if "/" in relative else told_name(path)
    return key if key not in taken else f"{folder.path.name}/{key}"


def _command_line() -> list[Path]:
    """Returns the folders that follow ``--`` in ``streamlit run app -- FOLDER``."""
    if Path(sys.argv[0]).name != _ENTRY:
        return []
    return list(_paths(sys.argv[1:]))


def _environment() -> list[Path]:
    return list(_paths(_SEPARATOR.split(os.environ.get(VARIABLE, ""))))


def _paths(names: list[str]) -> Iterator[Path]:
    return (location(name).expanduser() for name in names if name)
