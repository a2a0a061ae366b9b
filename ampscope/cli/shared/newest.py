"""The run that a verb means when none is named."""

from __future__ import annotations

from pathlib import Path

import typer

from ampscope.errors import RunNotFound

#: Where `ampscope.watch` records unless told otherwise.
DEFAULT_FOLDER = Path("ampscope_runs")
RUN_HELP = f"The run's folder or URL, as ampscope.watch printed it; the newest below ./{DEFAULT_FOLDER} if left out."


def named_or_newest(run: Path | None) -> Path:
    """``run``, or the newest below ``./ampscope_runs``, which standard error then names.

    Raises:
        RunNotFound: none was named and there is none.
    """
    from ampscope.report.safe_text import visible
    from ampscope.trace.read.find import find_runs
    from ampscope.trace.remote.location import location

    if run is not None:
        return location(run)
    newest = next(iter(find_runs(DEFAULT_FOLDER)), None)
    if newest is None:
        raise RunNotFound(
            f"There is no run in ./{DEFAULT_FOLDER}; give the folder that ampscope.watch printed when the training "
            "started."
        )
    typer.echo(f"ampscope: no run named; the newest is {visible(str(newest))}", err=True)
    return newest
