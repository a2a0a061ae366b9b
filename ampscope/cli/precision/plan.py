"""``ampscope plan``: which modules could compute in a narrower format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.engine import DUCKDB, EngineOption
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError

#: What people call the formats.
_SHORT = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "mxfp8": "mxfp8_e4m3",
}


def plan(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    to: Annotated[str | None, typer.Option(help="One format in detail: bf16, fp16, fp8, e5m2, mxfp8, tf32.")] = None,
    rank: Annotated[int | None, typer.Option(help="Whose values; of the first traced rank if left out.", min=0)] = None,
    engine: EngineOption = DUCKDB,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say which modules could compute in bf16, fp16, fp8, MX or tf32, what each would lose there, and which stay up."""
    from ampscope.analysis.precision.plan import only
    from ampscope.analysis.precision.plan import plan as plan_of
    from ampscope.cli.shared.terminal import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.plan_text import as_text
    from ampscope.trace.read.run import open_run

    name = _format(to)
    with open_run(named_or_newest(run), engine=engine) as opened:
        if rank is not None and rank not in opened.ranks:
            raise AmpscopeError(f"rank {rank} has written nothing into this run")
        found = plan_of(opened, rank=rank)
    if json:
        typer.echo(as_json(only(found, name) if name else found))
    else:
        show(as_text(found, name))


def _format(asked: str | None) -> str | None:
    from ampscope.analysis.precision.plan_modules import NAMES

    if asked is None:
        return None
    name = _SHORT.get(asked.lower(), asked.lower())
    if name not in NAMES:
        raise AmpscopeError(f"{asked!r} is no format that can be planned; there are {', '.join(NAMES)}")
    return name
