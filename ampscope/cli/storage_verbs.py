"""``compact`` puts runs at rest into fewer files, ``upload`` sends what is left of them to an object store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.output import Exit
from ampscope.cli.run_argument import DEFAULT_FOLDER, complete_run, runs_in

#: What leads on from a folder without runs.
_NAME_ONE = f"give a run's folder, or one with runs, e.g. ./{DEFAULT_FOLDER}"


def compact(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN|DIR...",
            autocompletion=complete_run,
            help=f"Runs, or folders with runs up to two levels below; ./{DEFAULT_FOLDER} if none.",
        ),
    ] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Nobody reads the runs now: remove what was merged without waiting.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Merge the small files of runs that nobody writes any more; what is read of them stays the same.

    Journals that a killed process left are sealed. A minute after the last merge the files that were merged are
    removed, for a reader may still be about to open them. It may be killed at any moment, and be called again. The exit
    code is 2 if something could not be read or changed.
    """
    from ampscope.cli.output import show
    from ampscope.report.json import as_json
    from ampscope.report.terminal.runs_text import compaction_text
    from ampscope.trace.compaction import compact as compact_runs
    from ampscope.trace.write.sealing import AGE_S

    found = list(dict.fromkeys(run for folder in folders or [DEFAULT_FOLDER] for run in runs_in(folder, _NAME_ONE)))
    done = compact_runs(found, dry_run=dry_run, age=0.0 if at_once else AGE_S, waits=_wait)
    if json:
        typer.echo(as_json(done))
    else:
        show(compaction_text(done))
    if any(left.failed for run in done.runs for left in run.left_alone):
        raise typer.Exit(Exit.FAILED)


def _wait(seconds: float) -> None:
    typer.echo(
        f"ampscope: waiting {seconds:.0f} s before the merged files are removed, for a reader may be about to open "
        "them; --at-once does not wait",
        err=True,
    )
    time.sleep(seconds)


def upload(
    spools: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SPOOL...", help="As ampscope.watch named them; all of this user if left out."),
    ] = None,
) -> None:
    """Send what a training could not: its network was down, or it was killed.

    The exit code is 0 where nothing is left, 2 where something is.
    """
    from ampscope.report.safe_text import visible
    from ampscope.trace.upload.spool import waiting
    from ampscope.trace.upload.sync import send_left

    found = spools or waiting()
    if not found:
        typer.echo("Nothing is left to send.")
    left = 0
    for spool in found:
        sent = send_left(spool, lambda text: typer.echo(f"ampscope: {visible(text)}", err=True))
        left += sent.left
        rest = f", {sent.left} left in {sent.spool}: {sent.why}" if sent.left else ""
        typer.echo(visible(f"{sent.home}: {sent.files} files sent{rest}"))
    raise typer.Exit(Exit.FAILED if left else Exit.HEALTHY)
