"""``ampscope schema``: what verbs print with ``--json``, for programs."""

from __future__ import annotations

import importlib
import json
from typing import Annotated

import typer

from ampscope.errors import AmpscopeError

#: Where the result of each verb that has ``--json`` is declared.
RESULTS = {
    "diagnose": "ampscope.analysis.results:Diagnosis",
    "gate": "ampscope.analysis.diagnosis.gate:Gate",
    "compare": "ampscope.analysis.replay.compare.results:Comparison",
    "ranges": "ampscope.analysis.precision.ranges.ranges:Ranges",
    "plan": "ampscope.analysis.precision.plan:Plan",
    "scale": "ampscope.analysis.scale.answer:ScaleAnswer",
    "fleet": "ampscope.analysis.diagnosis.fleet_results:Fleet",
    "audit": "ampscope.analysis.precision.audit:Audit",
    "compact": "ampscope.trace.compact.results:Compaction",
}


def _verbs(incomplete: str) -> list[str]:
    return [verb for verb in RESULTS if verb.startswith(incomplete)]


def schema(
    verb: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(RESULTS)}; all if left out.", autocompletion=_verbs)
    ] = None,
) -> None:
    """Print the JSON Schema of what a verb prints with --json; of all verbs, by name, if none is named."""
    from ampscope.report.json import schema_of

    if verb is not None and verb not in RESULTS:
        raise AmpscopeError(f"{verb!r} prints no JSON; there are {', '.join(RESULTS)}")
    found = {name: schema_of(_result(name)) for name in ([verb] if verb is not None else RESULTS)}
    typer.echo(json.dumps(found[verb] if verb is not None else found, indent=2))


def _result(verb: str) -> type:
    module, _, name = RESULTS[verb].partition(":")
    result: type = getattr(importlib.import_module(module), name)
    return result
