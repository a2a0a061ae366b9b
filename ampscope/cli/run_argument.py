"""The run that a verb means is named, completed by the shell, or the newest; and it is queried by an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from ampscope.errors import RunNotFound

#: Where `ampscope.watch` records unless told otherwise.
DEFAULT_FOLDER = Path("ampscope_runs")
#: Which runs are meant where none is named.
AT_HAND = f"./{DEFAULT_FOLDER}, or where none is in it, up to three levels below the working directory"
RUN_HELP = f"The run's folder or URL, as printed when the training began. If left out, the newest in {AT_HAND}."


def named_or_newest(run: Path | None) -> Path:
    """``run``, or the newest at hand, which standard error then names.

    Raises:
        RunNotFound: none was named and there is none.
    """
    from ampscope.report.safe_text import visible
    from ampscope.trace.location import location
    from ampscope.trace.read.find import from_here

    if run is not None:
        return location(run)
    newest = runs_at_hand()[0]
    typer.echo(f"ampscope: no run named; the newest is {visible(from_here(newest))}", err=True)
    return newest


def runs_at_hand() -> list[Path]:
    """The runs in ``./ampscope_runs``; where there are none, those that lie around the working directory, newest first.

    Raises:
        RunNotFound: there are none.
    """
    from ampscope.trace.manifest import NAME_IT
    from ampscope.trace.read.find import find_runs, runs_around

    found = find_runs(DEFAULT_FOLDER) or runs_around(Path())
    if not found:
        raise RunNotFound(
            f"There is no run in ./{DEFAULT_FOLDER}, nor up to three levels below the working directory. {NAME_IT}"
        )
    return found


def runs_in(folder: Path, lead: str) -> list[Path]:
    """The runs in a folder that was named, newest first.

    Args:
        folder: Or a URL.
        lead: What is said of how to go on where there are none.

    Raises:
        RunNotFound: there are none.
    """
    from ampscope.trace.location import location
    from ampscope.trace.read.find import find_runs

    folder = location(folder)
    found = find_runs(folder)
    if not found:
        what = "There is no run in" if folder.is_dir() else "There is no folder"
        raise RunNotFound(f"{what} {folder}; {lead}.")
    return found


#: As `ampscope.trace.schema` has it, which loads Arrow.
MANIFEST = "run.json"
#: Entries of a folder that are looked at.
_MOST = 1000
#: Names that are offered. Shells put them into lines of their own, some of them unquoted: one that holds more than
#: these characters, which somebody else may have chosen, could be run there.
_OFFERED = re.compile(r"[\w.,+@%=~/ -]+")


def complete_run(incomplete: str) -> list[str]:
    """The runs in the folder that is being typed, or below ``./ampscope_runs``; without any, shells offer files.

    Args:
        incomplete: What is typed.
    """
    typed, slash, _ = incomplete.rpartition("/")
    folder = f"{typed}{slash}" if slash else f"{DEFAULT_FOLDER}/"
    found = [run for run in _runs(folder) if run.startswith(incomplete) and _OFFERED.fullmatch(run)]
    return [_in_line(run) for run in sorted(found)]


def _runs(folder: str) -> Iterator[str]:
    for name in _folders(folder):
        if os.path.isfile(f"{folder}{name}/{MANIFEST}"):  # noqa: PTH113  # importing less is quicker
            yield f"{folder}{name}"
        else:
            below = f"{folder}{name}/"
            yield from (f"{below}{each}" for each in _folders(below) if os.path.isfile(f"{below}{each}/{MANIFEST}"))  # noqa: PTH113


def _folders(folder: str) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _MOST) if not entry.name.startswith(".") and entry.is_dir()]
    return []


class _InBash(str):
    """A run as it stands in bash's line. It begins as what was typed before that was escaped."""

    __slots__ = ()

    def startswith(self, typed: Any, *_: Any) -> bool:
        """Whether it is what was being typed, as typer asks."""
        return self.replace("\\ ", " ").startswith(typed)


def _in_line(run: str) -> str:
    """A run as it stands in the line: bash takes it as it is, other shells quote it themselves."""
    is_bash = os.environ.get("_AMPSCOPE_COMPLETE", "").endswith("_bash")
    return _InBash(run.replace(" ", "\\ ")) if is_bash else run


DUCKDB = "duckdb"
EngineOption = Annotated[
    str,
    typer.Option(
        help="What queries the large tables: duckdb; spark, which is started for it; or a Spark Connect server.",
        metavar="duckdb|spark|sc://HOST:PORT",
    ),
]
