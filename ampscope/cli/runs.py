"""``ampscope runs``: the runs in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampscope.cli.shared.newest import AT_HAND, runs_at_hand, runs_in
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.analysis.overview.run_list import RunSummary
    from ampscope.report.terminal.run_list import ListedRun


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help=f"The folder or URL to look in, two levels deep. If left out, {AT_HAND}."),
    ] = None,
    search: Annotated[str, typer.Option(help="Only runs with these words in name, model, device, tags or state.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Tell what was recorded, without diagnosing: hundreds of runs in a second.")
    ] = False,
) -> None:
    """List the runs in a folder, newest first, each with its verdict."""
    from ampscope.analysis.overview.run_list import run_summaries
    from ampscope.cli.shared.terminal import show
    from ampscope.report import numbers
    from ampscope.report.safe_text import visible
    from ampscope.report.terminal.run_list import as_list

    found = (
        runs_in(folder, "give the folder that runs are recorded in, e.g. ./ampscope_runs")
        if folder is not None
        else runs_at_hand()
    )
    matching = [each for each in run_summaries(found) if each.matches(search)]
    if not matching:
        looked = numbers.count(len(found), "run")
        where = f" in {visible(str(folder))}" if folder is not None else ""
        typer.echo(f"No run{where} matches {search!r} (looked at {looked}).")
        return
    show(as_list([_listed(each, quick=quick) for each in matching]))


def _listed(seen: RunSummary, *, quick: bool) -> ListedRun:
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.report.terminal.run_list import ListedRun

    if quick or seen.problem:
        return ListedRun(summary=seen)
    try:
        return ListedRun(summary=seen, diagnosis=diagnose(seen.path))
    except AmpscopeError as error:
        return ListedRun(summary=replace(seen, problem=str(error)))
