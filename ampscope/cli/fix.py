"""``ampscope fix`` shows a remedy as a change of the user's own file, and makes it where that is asked for."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampscope.cli.run_argument import RUN_HELP, complete_run, named_or_newest
from ampscope.errors import AmpscopeError

if TYPE_CHECKING:
    from ampscope.analysis.results import Remedy, SourceLine
    from ampscope.cures.rewriting.source_file import SourceFile

REMEDY = Annotated[
    int | None,
    typer.Option("--remedy", help="Which remedy of the diagnosis, from 1; the first with a change if left out.", min=1),
]
ROOT = Annotated[
    Path, typer.Option("--root", help="The folder below which the program lies.", exists=True, file_okay=False)
]


def fix(
    run: Annotated[Path | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run)] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Change the file, and keep the old one beside it.")] = False,
    remedy: REMEDY = None,
    root: ROOT = Path(),
) -> None:
    """Show a remedy as a diff of your own lines; with --apply, change them.

    Only a file below the root is changed, and only if the line still reads as it was recorded. The file as it was is
    kept beside it, with .bak at its end. The exit code is 2 where there is nothing to show or to change.
    """
    from ampscope.report.safe_text import visible

    chosen = remedy_with_diff(named_or_newest(run), remedy, root)
    diff = chosen.diff or ""
    tried = {True: " It was tried on the step, and cures it.", None: " It was not tried."}.get(chosen.verified, "")
    typer.echo(f"ampscope: {visible(chosen.text)}{tried}", err=True)
    typer.echo("\n".join(visible(row.removesuffix("\r")) for row in diff.removesuffix("\n").split("\n")))
    if not apply:
        return

    source, content = changed_file(diff, root)
    backup = replaced(source.path, source.text.encode(source.encoding), content)
    typer.echo(f"ampscope: changed {source.path}; as it was, it is kept in {backup}", err=True)


def remedy_with_diff(run: Path, number: int | None, root: Path) -> Remedy:
    """The remedy that is meant: one with a change of the user's own lines.

    Args:
        run: The run's folder.
        number: The number that ``ampscope diagnose`` gives it; None for the first with a change.
        root: The folder below which the program lies.

    Raises:
        AmpscopeError: there is none.
    """
    from ampscope.analysis.cures.own_words import changed_since
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.cures.rewriting.source_file import files_below
    from ampscope.report.safe_text import visible
    from ampscope.trace.read.run import open_run

    with files_below(root), open_run(run) as opened:
        diagnosis = diagnose(opened)
        source = diagnosis.primary.source if diagnosis.primary is not None else None
        changed = changed_since(opened, source.file) if source is not None else None
    if diagnosis.primary is None:
        raise AmpscopeError(f"there is nothing to fix: {diagnosis.summary}")
    remedies = diagnosis.primary.remedies
    if number is not None and number > len(remedies):
        raise AmpscopeError(f"there is no remedy {number}; the diagnosis has {len(remedies)}")
    meant = remedies if number is None else remedies[number - 1 : number]
    found = next((each for each in meant if each.diff and (number is not None or each.verified is not False)), None)
    if found is None:
        which = "no remedy of this run" if number is None else f"remedy {number}"
        if changed is not None:
            raise AmpscopeError(f"{_moved_on(changed)}, so {which} can be written into it; {_AGAIN}")
        raise AmpscopeError(
            f"{which} can be written as a change of one place in your files; `ampscope diagnose` says what to change"
        )
    if changed is not None:
        typer.echo(
            f"ampscope: {visible(_moved_on(changed))}; the change is one of what was recorded; {_AGAIN}", err=True
        )
    return found


#: What helps where a file is not what was recorded any more.
_AGAIN = "train with it and diagnose the new run"


def _moved_on(line: SourceLine) -> str:
    return f"{line.file}:{line.line} no longer reads as it was recorded (it may have been mended already)"


def changed_file(diff: str, root: Path) -> tuple[SourceFile, bytes]:
    """The file that a diff changes, and what it becomes.

    Raises:
        AmpscopeError: the file is not there, or does not read as it was recorded.
    """
    from ampscope.cures.rewriting.edit import applied, file_of, first_line
    from ampscope.cures.rewriting.source_file import files_below, path_below, read
    from ampscope.cures.rewriting.statement import parsed
    from ampscope.report.safe_text import visible

    name = file_of(diff)
    with files_below(root):
        path = path_below(name)
    source = read(path) if path is not None else None
    if source is None:
        raise AmpscopeError(f"{visible(name)} is no file of Python source below {root.absolute()}; nothing was changed")
    text = applied(diff, source)
    if text is None or parsed(text) is None:
        raise AmpscopeError(
            f"{path}:{first_line(diff)} does not read as it was recorded, so nothing was changed; {_AGAIN}"
        )
    return source, text.encode(source.encoding)


def replaced(path: Path, before: bytes, after: bytes) -> Path:
    """Puts other content into a file, and keeps a copy of what it was.

    Args:
        path: The file.
        before: What it holds.
        after: What it is to hold.

    Returns:
        The copy, beside the file, with ``.bak`` at its end.

    Raises:
        AmpscopeError: the file may not be written, or holds something else by now; it stays as it is.
    """
    if not _may_write(path):
        raise AmpscopeError(f"cannot write {path}: it is read-only; nothing was changed")
    kept = _copy(path, before)
    try:
        _exchange(path, before, after)
    except BaseException:
        kept.unlink()
        raise
    return kept


def _may_write(path: Path) -> bool:
    """Whether a file may be written; that its folder may be is enough to replace it, and not asked."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return bool(mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)) and os.access(path, os.W_OK)


def _copy(path: Path, content: bytes) -> Path:
    """Keeps a file's content beside it, under a name that was free; returns that path."""
    number = 0
    while True:
        kept = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            file = kept.open("xb")
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise AmpscopeError(f"cannot keep {path} as {kept}: {error.strerror or error}") from None
        try:
            with file:
                file.write(content)
            shutil.copymode(path, kept)
        except OSError as error:
            kept.unlink()
            raise AmpscopeError(f"cannot keep {path} as {kept}: {error.strerror or error}") from None
        return kept


def _exchange(path: Path, before: bytes, after: bytes) -> None:
    """The file with other content, all of it or as it was."""
    written = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".ampscope-", delete=False) as file:
            written = Path(file.name)
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, written)
        if path.is_symlink() or path.read_bytes() != before:
            raise AmpscopeError(f"{path} has changed meanwhile, so nothing was changed; run it again")
        written.replace(path)
        written = None
    except OSError as error:
        raise AmpscopeError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if written is not None:
            written.unlink(missing_ok=True)
