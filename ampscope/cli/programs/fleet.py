"""``ampscope fleet``: questions over all runs below folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.engine import DUCKDB, EngineOption
from ampscope.errors import AmpscopeError, RunNotFound

_CHOICES = ("none", "recorded", "all")


def fleet(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders or URLs below which runs lie.")],
    days: Annotated[
        float, typer.Option(help="Length of the window that is compared with the one before.", min=0.001)
    ] = 7,
    diagnose: Annotated[
        str,
        typer.Option(
            help="Which runs are diagnosed: those that recorded an incident or a finding, none, or all.",
            metavar="|".join(_CHOICES),
        ),
    ] = "recorded",
    engine: EngineOption = DUCKDB,
    *,
    cache: Annotated[bool, typer.Option(help="Remember verdicts of runs that do not change.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say of all runs what fails and where, on which hosts and versions, what it costs, and what changed this week."""
    from ampscope.analysis.diagnosis.fleet import Diagnosed
    from ampscope.analysis.diagnosis.fleet import fleet as fleet_of
    from ampscope.cli.shared.terminal import show
    from ampscope.cli.shared.verdict_cache import VerdictCache
    from ampscope.report.json import as_json
    from ampscope.report.terminal.fleet_text import as_text
    from ampscope.trace.fleet.runs_below import runs_below

    if diagnose not in _CHOICES:
        raise AmpscopeError(f"--diagnose {diagnose!r} is none of {', '.join(_CHOICES)}")
    runs = runs_below(paths)
    if not runs:
        raise RunNotFound(f"There is no run below {', '.join(map(str, paths))}; give the folders that runs lie in.")
    known = VerdictCache() if cache else None
    try:
        found = fleet_of(runs, days=days, diagnosed=Diagnosed(diagnose), known=known, engine=engine)
    finally:
        if known is not None:
            known.close()
    if json:
        typer.echo(as_json(found))
    else:
        show(as_text(found))
