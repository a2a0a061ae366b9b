"""The blocks that a report for the terminal is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampscope.report.safe_text import visible, visible_lines

#: Columns by which a section's content stands under its heading, and code under what it belongs to.
INDENT = 2
CODE_INDENT = 6
#: Where a part of a diff begins, by the number of the line in the old file.
_HUNK = re.compile(r"@@ -(\d+)")
#: A width that no table has.
_UNBOUNDED = 10_000


def heading(text: str) -> Text:
    """The title of a section, after an empty line."""
    return Text(f"\n{text}", style="bold")


def line(text: str, *, style: str = "") -> RenderableType:
    """One line of someone else's text, folded where the terminal ends."""
    return indented(Text(visible(text), style=style, overflow="fold"))


def prose(text: str) -> RenderableType:
    """Sentences, wrapped at words."""
    return indented(Text("\n".join(visible_lines(text)), overflow="fold"))


def code(text: str) -> Text:
    """Lines to copy: never wrapped by us, so that the terminal hands them back whole."""
    lines = (" " * CODE_INDENT + each for each in visible_lines(text))
    return Text("\n".join(lines), style="yellow", no_wrap=True, overflow="ignore")


def changed_lines(diff: str) -> str:
    """Returns the lines that a unified diff takes out and puts in, under the place of each change, without context."""
    told: list[str] = []
    file, number = "", 0
    for row in diff.split("\n"):
        if row.startswith("+++ b/"):
            file = row.removeprefix("+++ b/")
        elif begins := _HUNK.match(row):
            number, told = int(begins[1]), [*told, ""]
        elif row.startswith(("-", "+")) and file:
            told = [*told[:-1], f"{file}:{number}", row] if told[-1:] == [""] else [*told, row]
        number += row.startswith(" ") and told[-1:] == [""]
    return "\n".join(told)


def indented(content: RenderableType) -> RenderableType:
    """``content`` under its section's heading."""
    return Padding(content, (0, 0, 0, INDENT), expand=False)


@dataclass(frozen=True, slots=True)
class Fitting:
    """A table that leaves out its least important columns where the terminal is narrow."""

    draw: Callable[[Sequence[str]], Table]
    columns: tuple[str, ...]
    expendable: tuple[str, ...]  #: the first to go comes first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept = list(self.columns)
        unbounded = options.update(max_width=_UNBOUNDED)
        for column in (column for column in self.expendable if column in kept):
            if Measurement.get(console, unbounded, self.draw(kept)).maximum <= options.max_width:
                break
            kept.remove(column)
        yield self.draw(kept)
