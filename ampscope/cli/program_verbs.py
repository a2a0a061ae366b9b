"""``gate``, ``perfetto``, ``schema`` and ``mcp`` tell other programs what is known of a run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ampscope
from ampscope.cli.output import OF_OUTCOMES
from ampscope.cli.run_argument import DEFAULT_FOLDER, RUN_HELP, complete_run, named_or_newest
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.analysis.diagnosis.gate import Gate

#: The file to which a step of a GitHub workflow appends what its summary shows.
_SUMMARY = "GITHUB_STEP_SUMMARY"


def gate(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    *,
    max_skipped: Annotated[
        str | None, typer.Option(help="Largest share of skipped steps, 1% or 0.01, once the scale has found its place.")
    ] = None,
    no_new_overflow: Annotated[
        bool,
        typer.Option("--no-new-overflow", help="No op overflows that does not in the baseline; without one, none."),
    ] = False,
    min_headroom: Annotated[
        float | None, typer.Option(help="Least factors of two between any value and its dtype's end.", min=0.0)
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A run that is held to be good, such as main's.", autocompletion=complete_run)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A run at risk fails, too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML into this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary in Markdown into this file.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write the findings as SARIF into this file.")] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print annotations for GitHub, and append to the job's summary.")
    ] = False,
) -> None:
    """Hold a run against limits: for a job that trains for some steps, and must not get worse.

    A run with a problem fails whatever else is asked. The exit code is 0 if all limits are kept, 1 if one is not, 2 if
    the run cannot be read or does not hold what a limit asks for.
    """
    from ampscope.analysis.diagnosis.gate import gate as gate_of
    from ampscope.analysis.diagnosis.gate_limits import Limits
    from ampscope.trace.read.run import open_run

    limits = Limits.asked(
        strict=strict, max_skipped=max_skipped, no_new_overflow=no_new_overflow, min_headroom=min_headroom
    )
    with ExitStack() as opened:
        held = opened.enter_context(open_run(baseline)) if baseline is not None else None
        found = gate_of(opened.enter_context(open_run(named_or_newest(run))), limits, held)
    _write(found, junit, markdown, sarif)
    _show(found, json=json, github=github)
    raise typer.Exit(OF_OUTCOMES[found.outcome])


def _write(found: Gate, junit: Path | None, markdown: Path | None, sarif: Path | None) -> None:
    from ampscope.cli.output import write
    from ampscope.report.ci import as_junit, as_markdown, as_sarif

    if junit is not None:
        write(junit, as_junit(found).encode())
    if markdown is not None:
        write(markdown, as_markdown(found).encode())
    if sarif is not None:
        write(sarif, as_sarif(found, version=ampscope.__version__).encode())


def _show(found: Gate, *, json: bool, github: bool) -> None:
    from ampscope.cli.output import show
    from ampscope.report.ci import as_annotations, as_markdown
    from ampscope.report.json import as_json
    from ampscope.report.terminal.verdict_text import gate_text

    if json:
        typer.echo(as_json(found))
    else:
        show(gate_text(found))
    if not github:
        return
    typer.echo(as_annotations(found), nl=False, err=json)
    summary = os.environ.get(_SUMMARY)
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(as_markdown(found))


def perfetto(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    step: Annotated[int | None, typer.Option(help="Which traced step; the newest if left out.", min=0)] = None,
    source: Annotated[
        str | None, typer.Option(help="live, replay, or a replay's name, if there are several; the first if left out.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Whose; the first traced rank's if left out.", min=0)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("step.json"),
) -> None:
    """Write a traced step for ui.perfetto.dev: modules, ops in order, dtypes, headroom, forward to backward."""
    from ampscope.analysis.replay.recording import recording
    from ampscope.analysis.tables.traced_steps import traced_steps
    from ampscope.cli.output import write
    from ampscope.report.perfetto import as_perfetto
    from ampscope.trace.read.find import told_name
    from ampscope.trace.read.run import open_run

    with open_run(named_or_newest(run)) as opened:
        traced = traced_steps(opened, rank=rank)
        fitting = [each for each in traced if step in {None, each.step} and source in {None, each.source}]
        if not fitting:
            known = ", ".join(dict.fromkeys(f"{each.step} ({each.source})" for each in traced[:10])) or "none"
            raise AmpscopeError(f"{opened.path} has no such traced step; the newest are {known}")
        content = as_perfetto(recording(opened, fitting[0]), name=told_name(opened.path, opened.manifest.name))
    write(output, content.encode())
    typer.echo(f"Wrote step {fitting[0].step} ({fitting[0].source}) to {output}. Open it in ui.perfetto.dev.")


#: Where the result of each verb that has ``--json`` is declared.
RESULTS = {
    "diagnose": "ampscope.analysis.results:Diagnosis",
    "gate": "ampscope.analysis.diagnosis.gate:Gate",
    "compare": "ampscope.analysis.replay.compare.compare_results:Comparison",
    "ranges": "ampscope.analysis.precision.ranges.ranges:Ranges",
    "plan": "ampscope.analysis.precision.plan:Plan",
    "scale": "ampscope.analysis.scale.answer:ScaleAnswer",
    "fleet": "ampscope.analysis.diagnosis.fleet_results:Fleet",
    "audit": "ampscope.analysis.precision.audit:AuditReport",
    "compact": "ampscope.trace.compaction:Compaction",
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
    from ampscope.cli.mcp_server import server_of
    from ampscope.trace.location import location

    asked = [location(folder) for folder in folders or [DEFAULT_FOLDER]]
    missing = [folder for folder in asked if not folder.is_dir()]
    if missing:
        raise AmpscopeError(f"there is no folder {missing[0]}; give one that runs are recorded in")
    server_of(asked).run("stdio")
