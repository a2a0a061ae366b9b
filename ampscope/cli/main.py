"""The command ``ampscope``: gathers the verbs, and turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

import ampscope
from ampscope.cli.compare import compare
from ampscope.cli.demo import demo
from ampscope.cli.diagnose import diagnose
from ampscope.cli.exits import Exit
from ampscope.cli.precision.audit import audit
from ampscope.cli.precision.plan import plan
from ampscope.cli.precision.ranges import ranges
from ampscope.cli.precision.scale import scale
from ampscope.cli.remedies.fix import fix
from ampscope.cli.remedies.verify import verify
from ampscope.cli.report import report
from ampscope.cli.repro import repro
from ampscope.cli.runs import runs
from ampscope.cli.view import view
from ampscope.errors import AmpscopeError
from ampscope.report.safe_text import visible

app = typer.Typer(
    name="ampscope",
    help="Find out which op, module and line broke a PyTorch mixed-precision run, why, and what cures it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (diagnose, fix, verify, compare, ranges, plan, scale, audit, report, repro, runs, view, demo):
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
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS)
    try:
        app()
    except AmpscopeError as error:
        typer.echo(f"ampscope: {' '.join(visible(str(error)).split())}", err=True)
        sys.exit(Exit.FAILED)
    finally:
        gc.set_threshold(*usual)
