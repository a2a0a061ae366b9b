"""``ampscope upload``: sends what is left of runs that go to an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.exits import Exit


def upload(
    spools: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SPOOL...", help="As ampscope.watch named them; all of this user if left out."),
    ] = None,
) -> None:
    """Send what a training could not: its network was down, or it was killed.

    The exit code is 0 where nothing is left, 2 where something is.
    """
    from ampscope.report.safe_text import visible
    from ampscope.trace.upload.leftover import send_left
    from ampscope.trace.upload.spool import waiting

    found = spools or waiting()
    if not found:
        typer.echo("Nothing is left to send.")
    left = 0
    for spool in found:
        sent = send_left(spool, lambda text: typer.echo(f"ampscope: {visible(text)}", err=True))
        left += sent.left
        rest = f", {sent.left} left in {sent.spool}: {sent.why}" if sent.left else ""
        typer.echo(visible(f"{sent.home}: {sent.files} files sent{rest}"))
    raise typer.Exit(Exit.FAILED if left else Exit.HEALTHY)
