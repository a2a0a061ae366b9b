"""``ampscope runs``: the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampscope.errors import AmpscopeError, RunNotFound

if TYPE_CHECKING:
    from ampscope.report.runs import ListedRun


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to look in, two levels deep.")] = Path(
        "ampscope_runs"
    ),
) -> None:
    """List the runs in a folder, newest first, each with its verdict."""
    from ampscope.cli.terminal import show
    from ampscope.report.runs import as_list
    from ampscope.trace.reader import find_runs

    found = find_runs(folder)
    if not found:
        what = "There is no run in" if folder.is_dir() else "There is no folder"
        raise RunNotFound(f"{what} {folder}; give the folder that ampscope.watch records to, e.g. ./ampscope_runs.")
    show(as_list([_listed(path) for path in found]))


def _listed(path: Path) -> ListedRun:
    from ampscope.analysis.diagnosis import diagnose
    from ampscope.report.runs import ListedRun

    try:
        return ListedRun(path=path, diagnosis=diagnose(path))
    except AmpscopeError as error:
        return ListedRun(path=path, diagnosis=None, problem=str(error))
