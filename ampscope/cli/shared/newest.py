"""The run that a verb means when none is named."""

from __future__ import annotations

from pathlib import Path

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
    from ampscope.trace.read.find import from_here
    from ampscope.trace.remote.location import location

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
    from ampscope.trace.read.find import find_runs
    from ampscope.trace.remote.location import location

    folder = location(folder)
    found = find_runs(folder)
    if not found:
        what = "There is no run in" if folder.is_dir() else "There is no folder"
        raise RunNotFound(f"{what} {folder}; {lead}.")
    return found
