"""A small table whose cells wrap and whose text is text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ampscope.report.html.markup import as_html

#: Characters up to which a cell does not wrap.
_ONE_LINE = 26
#: Characters of a cell that are shown; the middle of a longer text is left out.
_LONGEST = 120
#: Before the next part of a name.
_DOT = re.compile(r"\.(?=[^\d\s])")
#: Columns beyond which a row becomes a list, each value beside its column's name, where the window is narrow.
_MANY = 6


class TableRows(NamedTuple):
    """What stands in a table, however it is drawn."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numeric: Collection[str] = ()  #: columns that are set to the right


def table_html(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Collection[str] = (),
) -> str:
    """``rows`` under ``columns``.

    Args:
        columns: Their names.
        rows: Of each row the cells.
        numeric: Columns that are set to the right.
    """
    aligned = ["num" if name in numeric else "" for name in columns]
    head = _cells("th", columns, aligned, [""] * len(columns))
    many = len(columns) > _MANY
    kind = " many" if many else ""
    names = [f' data-column="{as_html(name)}"' if many else "" for name in columns]
    body = "".join(f"<tr>{_cells('td', row, aligned, names)}</tr>" for row in rows)
    return (
        f'<div class="amp-scroll"><table class="amp-table{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(tag: str, row: Sequence[str], aligned: Sequence[str], names: Sequence[str]) -> str:
    return "".join(_cell(tag, *cell) for cell in zip(row, aligned, names, strict=True))


def _cell(tag: str, text: str, side: str, name: str) -> str:
    """Short cells stay on one line; long names may break after a dot, numbers never."""
    if len(text) <= _ONE_LINE:
        return f'<{tag} class="{side} one-line"{name}>{as_html(text)}</{tag}>'
    return f'<{tag} class="{side} long"{name}>{_DOT.sub(".<wbr>", as_html(text, _LONGEST))}</{tag}>'
