"""A small table whose cells wrap and whose text is text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ampscope.report.html.markup import as_html

#: Characters up to which a cell does not wrap.
_ONE_LINE = 26
#: Characters of a cell that are shown; the middle of a longer text is left out.
_LONGEST = 120


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Collection[str] = ()) -> str:
    """``rows`` under ``columns``; those named in ``numeric`` are set to the right."""
    aligned = ["num" if name in numeric else "" for name in columns]
    head = _cells("th", columns, aligned)
    body = "".join(f"<tr>{_cells('td', row, aligned)}</tr>" for row in rows)
    return (
        f'<div class="amp-scroll"><table class="amp-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(tag: str, row: Sequence[str], aligned: Sequence[str]) -> str:
    return "".join(_cell(tag, cell, side) for cell, side in zip(row, aligned, strict=True))


def _cell(tag: str, text: str, side: str) -> str:
    """Short cells stay on one line; long names may break after a dot."""
    if len(text) <= _ONE_LINE:
        return f'<{tag} class="{side} one-line">{as_html(text)}</{tag}>'
    return f'<{tag} class="{side} long">{as_html(text, _LONGEST).replace(".", ".<wbr>")}</{tag}>'
