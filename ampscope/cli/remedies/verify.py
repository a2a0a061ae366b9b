"""``ampscope verify``: a command run again with a remedy in it, and whether the failure has gone."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampscope.cli.remedies.fix import REMEDY, ROOT, changed_file, remedy_with_diff
from ampscope.cli.remedies.overlay import Overlay, named_python
from ampscope.cli.shared.completion import complete_run
from ampscope.cli.shared.exits import Exit
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:  # loaded by a verb when it runs
    from ampscope.analysis.results import Diagnosis


def verify(
    run: Annotated[
        Path,
        typer.Argument(
            help="The folder of the run that went wrong, as printed when the training began.",
            autocompletion=complete_run,
        ),
    ],
    command: Annotated[list[str], typer.Argument(help="The command that trained it, after --.")],
    remedy: REMEDY = None,
    root: ROOT = Path(),
) -> None:
    """Run a training again with a remedy in it, and say whether it cures it: for bug reports and CI.

    No file is changed: the command reads the changed one in the place of yours, and records a run of its own beside
    RUN. Healing is off. The exit code is 0 if the failure has gone and nothing else is wrong, 1 if not, 2 if that
    could not be found out.
    """
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.report.safe_text import visible
    from ampscope.trace.schema import MANIFEST
    from ampscope.trace.vocabulary import VERIFY_FOLDER

    chosen = remedy_with_diff(run, remedy, root)
    source, content = changed_file(chosen.diff or "", root)
    before, folder = diagnose(run), _free(run)
    typer.echo(f"ampscope: running it with this remedy: {visible(chosen.text)}", err=True)
    with tempfile.TemporaryDirectory(prefix="ampscope-verify-") as holder:
        overlay = Overlay(Path(holder), source.path, content)
        environment = overlay.environment({**os.environ, VERIFY_FOLDER: str(folder.absolute())})
        code = _run(overlay.command(named_python(command)), environment)
        if not overlay.was_read:
            raise AmpscopeError(f"the command ended with exit code {code} and has not loaded {source.path}")
    if not (folder / MANIFEST).exists():
        raise AmpscopeError(f"the command ended with exit code {code} and has recorded no run: it watches no model")
    after = diagnose(folder)
    exit_code, told = compared(before, after, code)
    typer.echo(f"ampscope: {visible(told)} Look: ampscope diagnose {visible(str(folder))}")
    raise typer.Exit(exit_code)


def compared(before: Diagnosis, after: Diagnosis, code: int) -> tuple[Exit, str]:
    """What became of a failure, in a sentence, and the exit code for it.

    Args:
        before: The run that went wrong.
        after: The one with the remedy.
        code: The exit code of its command.
    """
    from ampscope.analysis.causes.catalogue import item_in_words
    from ampscope.trace.vocabulary import Verdict

    failed = before.primary
    assert failed is not None, "a run without a failure has no remedy"
    was = f"{item_in_words(failed)} at step {failed.step}"
    if after.primary is not None and after.verdict is Verdict.PROBLEM:
        left = f"{item_in_words(after.primary)} at step {after.primary.step}"
        same = after.primary.cause == failed.cause
        return Exit.PROBLEM, f"Not cured: before, {was}; with the remedy, {'still' if same else 'now'} {left}."
    if after.verdict in (Verdict.NOT_OBSERVED, Verdict.PARTLY_OBSERVED) or after.run.steps <= failed.step:
        return Exit.FAILED, f"Not known: before, {was}; the new run made {after.run.steps:,} steps."
    if code:
        ended = f"the command ended with exit code {code}"
        return Exit.FAILED, f"Not known: nothing is wrong in {after.run.steps:,} steps, but {ended}."
    return Exit.HEALTHY, f"Cured: before, {was}; with the remedy nothing is wrong in {after.run.steps:,} steps."


def _run(command: list[str], environment: dict[str, str]) -> int:
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise AmpscopeError(f"cannot run {command[0]}: {error.strerror or error}") from None


def _free(run: Path) -> Path:
    """A folder beside a run that is not there yet."""
    number = 1
    while (folder := run.absolute().with_name(f"{run.absolute().name}-verified-{number}")).exists():
        number += 1
    return folder
