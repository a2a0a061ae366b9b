"""``audit``, ``plan``, ``ranges`` and ``scale`` say what a run's dtypes and its loss scale cost it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampscope.cli.run_argument import DUCKDB, RUN_HELP, EngineOption, complete_run, named_or_newest
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.analysis.scale.what_if import ScalerRules


def audit(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    step: Annotated[int | None, typer.Option(help="Which audit; the newest if left out.", min=0)] = None,
    rank: Annotated[int | None, typer.Option(help="Whose; of the first audited rank if left out.", min=0)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Rank the layers of an audited step by what they lose to rounding, and divide the loss's error among them."""
    from ampscope.analysis.precision.audit import audit as audit_of
    from ampscope.cli.output import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.audit_text import as_text
    from ampscope.trace.read.run import open_run

    with open_run(named_or_newest(run)) as opened:
        if rank is not None and rank not in opened.ranks:
            raise AmpscopeError(f"rank {rank} has written nothing into this run")
        found = audit_of(opened, step=step, rank=rank)
        if found is None:
            whole = audit_of(opened, rank=rank)
            known = ", ".join(str(each.step) for each in whole.audited[-5:]) if whole is not None else ""
            raise AmpscopeError(f"step {step} was not audited; " + (f"audited are {known}" if known else "none was"))
    if json:
        typer.echo(as_json(found))
    else:
        show(as_text(found))


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
    from ampscope.cli.output import show
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
    from ampscope.cli.output import show
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
    from ampscope.cli.output import show
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
