"""Printing to the terminal that the command runs in."""

from __future__ import annotations

from rich.console import Console, RenderableType


def show(content: RenderableType) -> None:
    """Prints ``content`` to standard output, as wide as the terminal is."""
    Console(highlight=False, markup=False, emoji=False).print(content, crop=False)
