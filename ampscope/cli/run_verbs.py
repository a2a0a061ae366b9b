"""``runs``, ``diagnose``, ``report``, ``repro``, ``compare`` and ``fleet`` say what became of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampscope.cli.output import Exit
from ampscope.cli.run_argument import (
    AT_HAND,
    DUCKDB,
    RUN_HELP,
    EngineOption,
    complete_run,
    named_or_newest,
    runs_at_hand,
    runs_in,
)
from ampscope.errors import AmpscopeError, RunNotFound

if TYPE_CHECKING:
    from ampscope.analysis.overview.run_list import RunSummary
    from ampscope.report.terminal.runs_text import ListedRun


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help=f"The folder or URL to look in, two levels deep. If left out, {AT_HAND}."),
    ] = None,
    search: Annotated[str, typer.Option(help="Only runs with these words in name, model, device, tags or state.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Tell what was recorded, without diagnosing: hundreds of runs in a second.")
    ] = False,
) -> None:
    """List the runs in a folder, newest first, each with its verdict."""
    from ampscope.analysis.overview.run_list import run_summaries
    from ampscope.cli.output import show
    from ampscope.report import numbers
    from ampscope.report.safe_text import visible
    from ampscope.report.terminal.runs_text import as_list

    found = (
        runs_in(folder, "give the folder that runs are recorded in, e.g. ./ampscope_runs")
        if folder is not None
        else runs_at_hand()
    )
    matching = [each for each in run_summaries(found) if each.matches(search)]
    if not matching:
        looked = numbers.count(len(found), "run")
        where = f" in {visible(str(folder))}" if folder is not None else ""
        typer.echo(f"No run{where} matches {search!r} (looked at {looked}).")
        return
    show(as_list([_listed(each, quick=quick) for each in matching]))


def _listed(seen: RunSummary, *, quick: bool) -> ListedRun:
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.report.terminal.runs_text import ListedRun

    if quick or seen.problem:
        return ListedRun(summary=seen)
    try:
        return ListedRun(summary=seen, diagnosis=diagnose(seen.path))
    except AmpscopeError as error:
        return ListedRun(summary=replace(seen, problem=str(error)))


def diagnose(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    engine: EngineOption = DUCKDB,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 also for a run that is at risk.")] = False,
) -> None:
    """Say what went wrong in a run, or is about to, where, why, and what to change.

    The exit code is 0 for a healthy run and one at risk, 1 for one with a problem, 2 if not all was observed, or
    nothing, or it cannot be read.
    """
    from ampscope.analysis.diagnosis.diagnosis import diagnose as diagnosis_of
    from ampscope.cli.output import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.diagnosis_text import as_text
    from ampscope.trace.vocabulary import Verdict

    diagnosis = diagnosis_of(named_or_newest(run), engine=engine)
    if json:
        typer.echo(as_json(diagnosis))
    else:
        show(as_text(diagnosis))
    verdict = diagnosis.verdict
    if verdict is Verdict.AT_RISK and (strict or diagnosis.unobserved):
        verdict = Verdict.PROBLEM if strict else Verdict.PARTLY_OBSERVED
    raise typer.Exit(Exit[verdict.name])


def report(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write the diagnosis of a run with its figures into one HTML file that needs no server and no network."""
    from ampscope.cli.output import write
    from ampscope.report.html.report_page import page_of
    from ampscope.report.numbers import size

    if output.exists() and not force:
        raise AmpscopeError(f"{output} exists; choose another name with -o, or --force to write over it")
    content = page_of(named_or_newest(run)).encode()
    write(output, content)
    typer.echo(f"Wrote {output} ({size(len(content))}). Open it in a browser.")


def repro(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    incident: Annotated[
        int | None,
        typer.Option(help="Which incident of the diagnosis, from 1; the one it tells first if left out.", min=1),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The script to write.")] = Path("repro.py"),
    force: Annotated[bool, typer.Option("--force", help="Write over files that exist.")] = False,
) -> None:
    """Write a standalone script that shows an op failing, in its dtype and in a wider one, for a bug report.

    It needs a run that was recorded with ampscope.watch(..., save_tensors=True).
    """
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.analysis.replay.reproducible import reproducible
    from ampscope.analysis.words import where_ranked
    from ampscope.report.repro import as_script
    from ampscope.trace.read.run import open_run

    beside = output.with_suffix(".safetensors")
    with open_run(named_or_newest(run)) as opened:
        diagnosis = diagnose(opened)
        found = reproducible(opened, diagnosis, incident)
        script = as_script(diagnosis.run, found, found.saved.content(), data_name=beside.name)
    _write(output, script.text.encode("ascii"), force=force)
    if script.data is not None:
        _write(beside, script.data, force=force)
    call = found.saved.call
    ranked = f" {where}" if (where := where_ranked(found.incident)) else ""
    typer.echo(
        f"Wrote {output}: {call.op} of incident {found.number}, step {call.step}{ranked}. Run it: python {output}"
    )
    if script.data is not None:
        typer.echo(f"Its operands are in {beside}; keep the two together.")


def _write(path: Path, content: bytes, *, force: bool) -> None:
    try:
        with path.open("wb" if force else "xb") as file:
            file.write(content)
    except FileExistsError:
        raise AmpscopeError(f"{path} exists; choose another name with -o, or --force to write over it") from None
    except OSError as error:
        raise AmpscopeError(f"cannot write {path}: {error.strerror or error}") from None


_HELP = "A run's folder; with a step of it RUN@STEP, with a rank RUN@STEP:RANK or RUN@:RANK."


def compare(
    a: Annotated[str, typer.Argument(help=_HELP, autocompletion=complete_run)],
    b: Annotated[
        str,
        typer.Argument(help="The other one, likewise; the same run for two of its steps.", autocompletion=complete_run),
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far results may be apart, as a share of their largest magnitude; 0 for not at all. "
            "If left out, what rounding in their dtypes allows for.",
            min=0.0,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what differs between two runs, or two steps, and with which op their numbers part.

    The exit code is 0 where they are the same within tolerance, 1 where they differ, 2 where one cannot be read.
    """
    from ampscope.analysis.replay.compare.compare_results import Likeness
    from ampscope.analysis.replay.compare.comparison import compare as comparison_of
    from ampscope.cli.output import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.verdict_text import comparison_text

    comparison = comparison_of(a, b, tolerance=tolerance)
    if json:
        typer.echo(as_json(comparison))
    else:
        show(comparison_text(comparison))
    raise typer.Exit(Exit.PROBLEM if comparison.likeness is Likeness.DIFFERENT else Exit.HEALTHY)


_CHOICES = ("none", "recorded", "all")


def fleet(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders or URLs below which runs lie.")],
    days: Annotated[
        float, typer.Option(help="Length of the window that is compared with the one before.", min=0.001)
    ] = 7,
    diagnose: Annotated[
        str,
        typer.Option(
            help="Which runs are diagnosed: those that recorded an incident or a finding, none, or all.",
            metavar="|".join(_CHOICES),
        ),
    ] = "recorded",
    engine: EngineOption = DUCKDB,
    *,
    cache: Annotated[bool, typer.Option(help="Remember verdicts of runs that do not change.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say of all runs what fails and where, on which hosts and versions, what it costs, and what changed this week."""
    from ampscope.analysis.diagnosis.fleet import Diagnosed
    from ampscope.analysis.diagnosis.fleet import fleet as fleet_of
    from ampscope.cli.output import show
    from ampscope.cli.verdict_cache import VerdictCache
    from ampscope.report.json import as_json
    from ampscope.report.terminal.runs_text import fleet_text
    from ampscope.trace.read.find import runs_below

    if diagnose not in _CHOICES:
        raise AmpscopeError(f"--diagnose {diagnose!r} is none of {', '.join(_CHOICES)}")
    runs = runs_below(paths)
    if not runs:
        raise RunNotFound(f"There is no run below {', '.join(map(str, paths))}; give the folders that runs lie in.")
    known = VerdictCache() if cache else None
    try:
        found = fleet_of(runs, days=days, diagnosed=Diagnosed(diagnose), known=known, engine=engine)
    finally:
        if known is not None:
            known.close()
    if json:
        typer.echo(as_json(found))
    else:
        show(fleet_text(found))
