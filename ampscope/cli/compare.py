"""``ampscope compare``: two runs, or two steps, against each other."""

from __future__ import annotations

from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.exits import Exit

_HELP = "A run's folder; with a step of it RUN@STEP, with a rank RUN@STEP:RANK or RUN@:RANK."


def compare(
    a: Annotated[str, typer.Argument(help=_HELP, autocompletion=complete_run)],
    b: Annotated[
        str,
        typer.Argument(help="The other one, likewise; the same run for two of its steps.", autocompletion=complete_run),
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far results may be apart, as a share of their largest magnitude; 0 for not at all. "
            "If left out, what rounding in their dtypes allows for.",
            min=0.0,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what differs between two runs, or two steps, and with which op their numbers part.

    The exit code is 0 where they are the same within tolerance, 1 where they differ, 2 where one cannot be read.
    """
    from ampscope.analysis.replay.compare.comparison import compare as comparison_of
    from ampscope.analysis.replay.compare.results import Likeness
    from ampscope.cli.shared.terminal import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.comparison_text import as_text

    comparison = comparison_of(a, b, tolerance=tolerance)
    if json:
        typer.echo(as_json(comparison))
    else:
        show(as_text(comparison))
    raise typer.Exit(Exit.PROBLEM if comparison.likeness is Likeness.DIFFERENT else Exit.HEALTHY)
