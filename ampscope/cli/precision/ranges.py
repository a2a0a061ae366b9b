"""``ampscope ranges``: how close a run's values come to the ends of their dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.engine import DUCKDB, EngineOption
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError

#: Places that are shown unless told otherwise; of JSON all.
_SHOWN = 10


def ranges(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    closest: Annotated[
        int | None, typer.Option(help=f"How many places to tell; {_SHOWN}, and of JSON all, if left out.", min=1)
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Whose values; of the first traced rank if left out.", min=0)] = None,
    engine: EngineOption = DUCKDB,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say how close values come to overflow, place by place, and at which step they will get there if they go on."""
    from ampscope.analysis.precision.ranges.ranges import ranges as ranges_of
    from ampscope.cli.shared.terminal import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.ranges_text import as_text
    from ampscope.trace.read.run import open_run

    with open_run(named_or_newest(run), engine=engine) as opened:
        if rank is not None and rank not in opened.ranks:
            raise AmpscopeError(f"rank {rank} has written nothing into this run; there are {_listed(opened.ranks)}")
        found = ranges_of(opened, rank=rank, closest=closest if json else closest or _SHOWN)
    if json:
        typer.echo(as_json(found))
    else:
        show(as_text(found))


def _listed(ranks: list[int]) -> str:
    return f"the ranks {', '.join(map(str, ranks))}" if ranks else "none"
