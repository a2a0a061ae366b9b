"""Which runs the app offers: those below the folders it was given, and nothing else on the disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampscope.trace.read.run import find_runs

#: The variable that names folders with runs, separated as in PATH.
VARIABLE = "AMPSCOPE_RUNS"
_ENTRY = "streamlit_app.py"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in which runs are looked for."""

    path: Path
    is_sample: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A run that can be chosen; ``key`` names it in the page's address."""

    key: str
    path: Path
    is_sample: bool


def places() -> tuple[Place, ...]:
    """The folders of the command line, else of the environment, else ``./ampscope_runs``; then the samples."""
    named = _command_line() or _environment() or [Path("ampscope_runs")]
    samples = Path(__file__).resolve().parents[2] / "sample_logs"
    return (*(Place(path.resolve()) for path in named), Place(samples, is_sample=True))


def offers(looked: tuple[Place, ...]) -> dict[str, Offer]:
    """The runs in ``looked`` by key, the newest first within each folder and none twice.

    Links are passed over: what they lead to is on offer under its own name, or lies outside.
    """
    found: dict[str, Offer] = {}
    paths: set[Path] = set()
    for place in looked:
        root = place.path.resolve()
        for path in find_runs(root) if root.is_dir() else ():
            where = path.resolve()
            if where in paths or where != path:
                continue
            paths.add(where)
            offer = Offer(_key(path, place, found), path, place.is_sample)
            found.setdefault(offer.key, offer)
    return found


def _key(path: Path, place: Place, taken: dict[str, Offer]) -> str:
    """The run's path below its folder; the folder's name in front where that alone is taken."""
    relative = path.relative_to(place.path.resolve()).as_posix()
    short = path.name if relative == "." else relative
    return short if short not in taken else f"{place.path.name}/{short}"


def _command_line() -> list[Path]:
    """What follows ``--`` in ``streamlit run app -- FOLDER``."""
    if Path(sys.argv[0]).name != _ENTRY:
        return []
    return list(_paths(sys.argv[1:]))


def _environment() -> list[Path]:
    return list(_paths(os.environ.get(VARIABLE, "").split(os.pathsep)))


def _paths(names: list[str]) -> Iterator[Path]:
    return (Path(name).expanduser() for name in names if name)
