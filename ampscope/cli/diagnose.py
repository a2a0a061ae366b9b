"""``ampscope diagnose``: the verdict on a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.engine import DUCKDB, EngineOption
from ampscope.cli.shared.exits import Exit
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest


def diagnose(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    engine: EngineOption = DUCKDB,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 also for a run that is at risk.")] = False,
) -> None:
    """Say what went wrong in a run, or is about to, where, why, and what to change.

    The exit code is 0 for a healthy run and one at risk, 1 for one with a problem, 2 if not all was observed, or
    nothing, or it cannot be read.
    """
    from ampscope.analysis.diagnosis.diagnosis import diagnose as diagnosis_of
    from ampscope.cli.shared.terminal import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.diagnosis_text import as_text
    from ampscope.trace.vocabulary import Verdict

    diagnosis = diagnosis_of(named_or_newest(run), engine=engine)
    if json:
        typer.echo(as_json(diagnosis))
    else:
        show(as_text(diagnosis))
    verdict = diagnosis.verdict
    if verdict is Verdict.AT_RISK and (strict or diagnosis.unobserved):
        verdict = Verdict.PROBLEM if strict else Verdict.PARTLY_OBSERVED
    raise typer.Exit(Exit[verdict.name])
