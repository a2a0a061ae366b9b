"""``ampscope report``: a run as one HTML file, for a ticket or the artifact of a CI job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError


def report(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write the diagnosis of a run with its figures into one HTML file that needs no server and no network."""
    from ampscope.cli.shared.output_file import write
    from ampscope.report.html.report_page import page_of
    from ampscope.report.numbers import size

    if output.exists() and not force:
        raise AmpscopeError(f"{output} exists; choose another name with -o, or --force to write over it")
    content = page_of(named_or_newest(run)).encode()
    write(output, content)
    typer.echo(f"Wrote {output} ({size(len(content))}). Open it in a browser.")
