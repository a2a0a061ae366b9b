"""The command ``ampscope``: gathers the verbs, and turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

import ampscope
from ampscope.cli.demo import demo
from ampscope.cli.fix import fix
from ampscope.cli.output import Exit, show_all
from ampscope.cli.precision_verbs import audit, plan, ranges, scale
from ampscope.cli.program_verbs import gate, mcp, perfetto, schema
from ampscope.cli.run_verbs import compare, diagnose, fleet, report, repro, runs
from ampscope.cli.storage_verbs import compact, upload
from ampscope.cli.verify import verify
from ampscope.cli.view import view
from ampscope.errors import AmpscopeError
from ampscope.report.safe_text import visible

app = typer.Typer(
    name="ampscope",
    help="Find out which op, module and line broke a PyTorch mixed-precision run, why, and what cures it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_LOOKING = (diagnose, compare, ranges, plan, scale, audit, report, runs, fleet, view)
for verb in (*_LOOKING, upload, fix, verify, repro, gate, schema, mcp, perfetto, compact, demo):
    app.command()(verb)
#: Objects that are made before Python looks for unused ones that refer to each other. A verb leaves next to none, and
#: ends after a second, of which the looks take a tenth at Python's own 700.
_OBJECTS = 1_000_000


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ampscope {ampscope.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command line; exit code 0 healthy, 1 a problem was found, 2 nothing was observed or done."""
    show_all()
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS)
    try:
        app(prog_name=app.info.name)  # however it was started: completion goes by the name
    except AmpscopeError as error:
        typer.echo(f"ampscope: {' '.join(visible(str(error)).split())}", err=True)
        sys.exit(Exit.FAILED)
    finally:
        gc.set_threshold(*usual)
