"""What a view looks like in a terminal."""

from __future__ import annotations

import io
from typing import Literal

from rich.console import Console, RenderableType


def printed(content: RenderableType, *, width: int = 100, colours: bool = False, terminal: bool = False) -> str:
    """``content`` as it comes out of a pipe or a terminal of ``width`` columns."""
    system: Literal["auto"] | None = "auto" if colours else None
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colours or terminal,
        color_system=system,
        highlight=False,
    )
    console.print(content, crop=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO from above
    return "\n".join(line.rstrip() for line in text.splitlines())
