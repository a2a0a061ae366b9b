"""``ampscope report``: a run as one HTML file, for a ticket or the artifact of a CI job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError


def report(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write the diagnosis of a run with its figures into one HTML file that needs no server and no network."""
    from ampscope.report.html.report_page import page_of
    from ampscope.report.numbers import size

    if output.exists() and not force:
        raise AmpscopeError(f"{output} exists; choose another name with -o, or --force to write over it")
    content = page_of(named_or_newest(run)).encode()
    _write(output, content)
    typer.echo(f"Wrote {output} ({size(len(content))}). Open it in a browser.")


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: whoever waits for the file never finds a part of it."""
    from ampscope.trace.files.durable import write_whole

    if path.is_dir():
        raise AmpscopeError(f"cannot write {path}: it is a folder; name a file in it with -o")
    try:
        write_whole(path, lambda temporary: _fill(temporary, content))
    except OSError as error:
        raise AmpscopeError(f"cannot write {path}: {error.strerror or error}") from None


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)
