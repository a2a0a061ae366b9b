"""Printing to the terminal that the command runs in."""

from __future__ import annotations

import io
import sys

from rich.console import Console, RenderableType


def show(content: RenderableType) -> None:
    """Prints ``content`` to standard output, as wide as the terminal is."""
    Console(highlight=False, markup=False, emoji=False).print(content, crop=False)


def show_all() -> None:
    """Has a terminal, or a file, show ``?`` for each character that its encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
