"""``ampscope view``: opens the app in the browser."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import ampscope
from ampscope.errors import AmpscopeError, RunNotFound

_ENTRY = "streamlit_app.py"
_NEEDED = ("streamlit", "plotly")


def view(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="RUN|DIR", help="A run, or a folder of runs; ./ampscope_runs if left out."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="The port to serve on; 8501 or the next free one if left out.", min=1, max=65535),
    ] = None,
) -> None:
    """Open the app on a run or a folder of runs, until interrupted with Ctrl-C."""
    if folder is not None and not folder.exists():
        raise RunNotFound(f"{folder} does not exist; give a run's folder or one with runs in it.")
    open_app(folder, port=port)


def open_app(folder: Path | None, *, port: int | None = None) -> None:
    """Serves the app to this machine alone, until interrupted.

    Raises:
        AmpscopeError: what the app needs is not installed, or the server stopped with an error.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise AmpscopeError(f"the app needs {' and '.join(missing)}; install it with: pip install 'ampscope[app]'")
    try:
        code = subprocess.call(command(folder, port))
    except KeyboardInterrupt:
        return
    if code:
        raise AmpscopeError(f"the app's server stopped with exit code {code}; its own message is above")


def command(folder: Path | None, port: int | None) -> list[str]:
    """The command that serves the app."""
    options = {
        "server.address": "localhost",
        "server.showEmailPrompt": "false",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
    }
    if port is not None:
        options["server.port"] = str(port)
    flags = [f"--{name}={value}" for name, value in options.items()]
    run = [sys.executable, "-m", "streamlit", "run", str(app_folder() / _ENTRY), *flags, "--"]
    return [*run, str(folder.resolve())] if folder is not None else run


def app_folder() -> Path:
    """Where the app lies: inside the installed package, or beside it in a checkout.

    Raises:
        AmpscopeError: it is in neither place.
    """
    package = Path(ampscope.__file__).resolve().parent
    for candidate in (package / "_app", package.parent / "app"):
        if (candidate / _ENTRY).is_file():
            return candidate
    raise AmpscopeError(f"the app is missing from {package}; reinstall ampscope")
