"""``ampscope perfetto``: a traced step for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError


def perfetto(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    step: Annotated[int | None, typer.Option(help="Which traced step; the newest if left out.", min=0)] = None,
    source: Annotated[
        str | None, typer.Option(help="live, replay, or a replay's name, if there are several; the first if left out.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Whose; the first traced rank's if left out.", min=0)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("step.json"),
) -> None:
    """Write a traced step for ui.perfetto.dev: modules, ops in order, dtypes, headroom, forward to backward."""
    from ampscope.analysis.replay.recording import recording
    from ampscope.analysis.tables.traced_steps import traced_steps
    from ampscope.cli.shared.output_file import write
    from ampscope.report.perfetto import as_perfetto
    from ampscope.trace.read.find import told_name
    from ampscope.trace.read.run import open_run

    with open_run(named_or_newest(run)) as opened:
        traced = traced_steps(opened, rank=rank)
        fitting = [each for each in traced if step in {None, each.step} and source in {None, each.source}]
        if not fitting:
            known = ", ".join(dict.fromkeys(f"{each.step} ({each.source})" for each in traced[:10])) or "none"
            raise AmpscopeError(f"{opened.path} has no such traced step; the newest are {known}")
        content = as_perfetto(recording(opened, fitting[0]), name=told_name(opened.path, opened.manifest.name))
    write(output, content.encode())
    typer.echo(f"Wrote step {fitting[0].step} ({fitting[0].source}) to {output}. Open it in ui.perfetto.dev.")
