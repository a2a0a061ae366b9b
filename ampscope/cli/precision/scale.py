"""``ampscope scale``: whether a run's loss scale is right, and what it would have been with other settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.engine import DUCKDB, EngineOption
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.analysis.scale.what_if import ScalerRules

#: What a setting must be.
_BOUNDS = {
    "init_scale": (0.0, "above 0"),
    "growth_factor": (1.0, "above 1"),
    "backoff_factor": (0.0, "between 0 and 1"),
    "growth_interval": (0.0, "a whole number above 0"),
    "floor": (0.0, "above 0"),
}


def scale(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    simulate: Annotated[
        str | None,
        typer.Option(help="Settings to try on the record: init_scale=1024,growth_interval=100.", metavar="SETTINGS"),
    ] = None,
    optimizer: Annotated[int | None, typer.Option(help="Whose steps; the first if left out.", min=0)] = None,
    rank: Annotated[int | None, typer.Option(help="Whose scaler; of the first rank if left out.", min=0)] = None,
    *,
    engine: EngineOption = DUCKDB,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say whether the loss scale is right, at which scales gradients fit, and what other settings would have done."""
    from ampscope.analysis.scale.answer import scale_answer, simulated
    from ampscope.cli.shared.terminal import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.scale_text import as_text
    from ampscope.trace.read.run import open_run

    with open_run(named_or_newest(run), engine=engine) as opened:
        if rank is not None and rank not in opened.ranks:
            raise AmpscopeError(f"rank {rank} has written nothing into this run")
        answer = scale_answer(opened, optimizer=optimizer, rank=rank)
        if simulate is not None:
            answer = simulated(answer, opened, settings(simulate, answer.rules))
    if json:
        typer.echo(as_json(answer))
    else:
        show(as_text(answer))


def settings(text: str, made: ScalerRules) -> ScalerRules:
    """The rules that ``name=value,name=value`` asks for; what it does not name is as the scaler was made.

    Raises:
        AmpscopeError: a name that is no setting, or a value that it cannot have.
    """
    asked: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _BOUNDS:
            raise AmpscopeError(f"{name!r} is no setting of a scaler; there are {', '.join(_BOUNDS)}")
        asked[name] = _number(name, value)
    interval = int(asked.pop("growth_interval", made.growth_interval))
    return replace(made, growth_interval=interval, **asked)


def _number(name: str, value: str) -> float:
    least, words = _BOUNDS[name]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    whole = name != "growth_interval" or number.is_integer()
    if not (least < number < math.inf and whole and (name != "backoff_factor" or number < 1)):
        raise AmpscopeError(f"{name} must be {words}, not {value!r}")
    return number
