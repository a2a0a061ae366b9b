"""``ampscope gate``: a run held against limits, for continuous integration."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ampscope
from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.exits import OF_OUTCOMES
from ampscope.cli.shared.newest import RUN_HELP, named_or_newest

if TYPE_CHECKING:  # loaded by the verb when it runs
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
    from ampscope.cli.shared.output_file import write
    from ampscope.report.ci import as_junit, as_markdown, as_sarif

    if junit is not None:
        write(junit, as_junit(found).encode())
    if markdown is not None:
        write(markdown, as_markdown(found).encode())
    if sarif is not None:
        write(sarif, as_sarif(found, version=ampscope.__version__).encode())


def _show(found: Gate, *, json: bool, github: bool) -> None:
    from ampscope.cli.shared.terminal import show
    from ampscope.report.ci import as_annotations, as_markdown
    from ampscope.report.json import as_json
    from ampscope.report.terminal.gate_text import as_text

    if json:
        typer.echo(as_json(found))
    else:
        show(as_text(found))
    if not github:
        return
    typer.echo(as_annotations(found), nl=False, err=json)
    summary = os.environ.get(_SUMMARY)
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(as_markdown(found))
