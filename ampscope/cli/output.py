"""A verb prints to the terminal, writes a file that it was asked to write, and ends with an exit code."""

from __future__ import annotations

import io
import sys
from enum import IntEnum
from pathlib import Path

from rich.console import Console, RenderableType

from ampscope.errors import AmpscopeError


def show(content: RenderableType) -> None:
    """Prints ``content`` to standard output, as wide as the terminal is."""
    Console(highlight=False, markup=False, emoji=False).print(content, crop=False)


def show_all() -> None:
    """Has a terminal, or a file, show ``?`` for each character that its encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write(path: Path, content: bytes) -> None:
    """Whole or not at all: whoever waits for the file never finds a part of it.

    Raises:
        AmpscopeError: it cannot be written.
    """
    from ampscope.trace.files.whole_files import write_whole

    if path.is_dir():
        raise AmpscopeError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        write_whole(path, lambda temporary: _fill(temporary, content))
    except OSError as error:
        raise AmpscopeError(f"cannot write {path}: {error.strerror or error}") from None


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)


class Exit(IntEnum):
    """The exit codes, by which a script learns how a call ended."""

    HEALTHY = 0
    AT_RISK = 0  #: 1 where it was asked for with ``--strict``
    PROBLEM = 1
    PARTLY_OBSERVED = 2  #: nothing is wrong in what was looked at, which is not all that should have been
    NOT_OBSERVED = 2  #: the run shows nothing that would allow a verdict
    FAILED = 2  #: it could not be read or done; one line on standard error says why


#: Of what is checked: the values of an `ampscope.analysis.diagnosis.gate.Outcome`.
OF_OUTCOMES = {"passed": Exit.HEALTHY, "failed": Exit.PROBLEM, "not_known": Exit.NOT_OBSERVED}
