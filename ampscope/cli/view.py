"""``ampscope view``: opens the app in the browser."""

from __future__ import annotations

import getpass
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

import ampscope
from ampscope.cli.run_argument import AT_HAND, complete_run
from ampscope.errors import AmpscopeError, RunNotFound
from ampscope.trace.location import location

_ENTRY = "streamlit_app.py"
_NEEDED = ("streamlit", "plotly")
#: The first port that is tried, and how many after it.
_PORT, _PORTS = 8501, 100


def view(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|DIR",
            autocompletion=complete_run,
            help=f"A run, or a folder or URL of runs. If left out, {AT_HAND}.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="The port to serve on; 8501 or the next free one if left out.", min=1, max=65535),
    ] = None,
) -> None:
    """Open the app on a run or a folder of runs, until interrupted with Ctrl-C."""
    folder = location(folder) if folder is not None else None
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
    port = port or free_port()
    if without_browser(os.environ):
        typer.echo(way_home(port, os.environ, user=_user(), host=socket.gethostname()))
    try:
        code = subprocess.call(command(folder, port))
    except KeyboardInterrupt:
        return
    if code:
        raise AmpscopeError(f"the app's server stopped with exit code {code}; its own message is above")


def without_browser(environment: Mapping[str, str]) -> bool:
    """Whether a browser on this machine would not be seen by who typed the command."""
    has_screen = not sys.platform.startswith("linux") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & environment.keys())
    return "SSH_CONNECTION" in environment or not has_screen


def way_home(port: int, environment: Mapping[str, str], *, user: str, host: str) -> str:
    """How the app is opened on the machine where the browser is.

    Args:
        port: That it is served on.
        environment: Tells of the connection, and of the login node of a Slurm job.
        user: Who logs in, and
        host: the name of this machine.
    """
    connection = environment.get("SSH_CONNECTION", "").split()
    login = environment.get("SLURM_SUBMIT_HOST", "")
    parts = ["ssh", "-N", "-L", f"{port}:localhost:{port}"]
    parts += ["-p", connection[3]] if len(connection) == 4 and connection[3] != "22" else []
    parts += ["-J", f"{user}@{login}"] if login and login != host else []
    return (
        "There is no browser on this machine. Where yours is, run\n\n"
        f"  {' '.join([*parts, f'{user}@{host}'])}\n\n"
        f"(with the name by which you reach this machine, if that is another), and open http://localhost:{port}\n"
    )


def free_port() -> int:
    """The first free port of this machine from 8501 on.

    Raises:
        AmpscopeError: a hundred are taken.
    """
    for port in range(_PORT, _PORT + _PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise AmpscopeError(f"the ports {_PORT} to {_PORT + _PORTS - 1} are taken; name a free one with --port")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a number without a name, as in a container
        return "you"


def command(folder: Path | None, port: int) -> list[str]:
    """The command that serves the app."""
    options = {
        "server.port": str(port),
        "server.address": "localhost",
        "server.showEmailPrompt": "false",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
    }
    if without_browser(os.environ):
        options["server.headless"] = "true"
        options["logger.hideWelcomeMessage"] = "true"  # it names an address of this machine; `way_home` says more
    flags = [f"--{name}={value}" for name, value in options.items()]
    run = [sys.executable, "-m", "streamlit", "run", str(app_folder() / _ENTRY), *flags, "--"]
    return [*run, str(folder.resolve())] if folder is not None else run


def app_folder() -> Path:
    """Returns the app's folder: inside the installed package, or beside it in a checkout.

    Raises:
        AmpscopeError: it is in neither place.
    """
    package = Path(ampscope.__file__).resolve().parent
    for candidate in (package / "_app", package.parent / "app"):
        if (candidate / _ENTRY).is_file():
            return candidate
    raise AmpscopeError(f"the app is missing from {package}; reinstall ampscope")
