"""``ampscope diagnose``: the verdict on a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.exits import Exit
from ampscope.cli.newest import RUN_HELP, named_or_newest


def diagnose(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what went wrong in a run, where, why, and what to change.

    The exit code is 0 for a healthy run, 1 for one with a problem, 2 if nothing was observed or it cannot be read.
    """
    from ampscope.analysis.diagnosis.diagnosis import diagnose as diagnosis_of
    from ampscope.cli.terminal import show
    from ampscope.report.diagnosis_json import as_json
    from ampscope.report.terminal.diagnosis_text import as_text

    diagnosis = diagnosis_of(named_or_newest(run))
    if json:
        typer.echo(as_json(diagnosis))
    else:
        show(as_text(diagnosis))
    raise typer.Exit(Exit[diagnosis.verdict.name])
