"""``ampscope diagnose``: the verdict on a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.exits import Exit


def diagnose(
    run: Annotated[Path, typer.Argument(help="The run's folder, as ampscope.watch printed it.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what went wrong in a run, where, why, and what to change.

    The exit code is 0 for a healthy run, 1 for one with a problem, 2 if it cannot be read.
    """
    from ampscope.analysis.diagnosis import diagnose as diagnosis_of
    from ampscope.cli.terminal import show
    from ampscope.report.json import as_json
    from ampscope.report.text import as_text
    from ampscope.trace.vocabulary import Verdict

    diagnosis = diagnosis_of(run)
    if json:
        typer.echo(as_json(diagnosis))
    else:
        show(as_text(diagnosis))
    raise typer.Exit(Exit.PROBLEM if diagnosis.verdict is Verdict.PROBLEM else Exit.HEALTHY)
