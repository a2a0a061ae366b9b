"""``ampscope mcp``: runs for an assistant in an editor."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.newest import DEFAULT_FOLDER
from ampscope.errors import AmpscopeError


def mcp(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR...", help=f"Only runs below these can be read; ./{DEFAULT_FOLDER} if left out."),
    ] = None,
) -> None:
    """Serve runs, diagnoses and tables over the Model Context Protocol, on standard input and output; only reading.

    In an editor's settings the command is ``ampscope``, its arguments ``mcp`` and the folder.
    """
    if importlib.util.find_spec("mcp") is None:
        raise AmpscopeError("ampscope mcp needs the protocol's SDK; pip install 'ampscope[mcp]'")
    from ampscope.cli.programs.mcp.server import server_of
    from ampscope.trace.remote.location import location

    asked = [location(folder) for folder in folders or [DEFAULT_FOLDER]]
    missing = [folder for folder in asked if not folder.is_dir()]
    if missing:
        raise AmpscopeError(f"there is no folder {missing[0]}; give one that runs are recorded in")
    server_of(asked).run("stdio")
