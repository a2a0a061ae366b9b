"""Paints modules by formats as a table whose cells are coloured; its numbers say what the colours do."""

from __future__ import annotations

from ampscope.report.figures.plan.matrix import Cell, MatrixRow, PlanMatrix
from ampscope.report.html.markup import as_html
from ampscope.report.wording.plan_words import module_words

#: Formats that fit a telephone; with more the table is scrolled there.
_FIT = 5


def plan_matrix_html(figure: PlanMatrix) -> str:
    """The figure; nothing without rows."""
    if not figure.rows:
        return ""
    heads = "".join(f'<th scope="col">{as_html(name)}</th>' for name in figure.columns)
    rows = "".join(map(_row, figure.rows))
    key = "".join(f'<span><i class="{kind}"></i>{as_html(words)}</span>' for kind, words in figure.key)
    aside = '<small class="amp-aside">More formats to the right</small>' if len(figure.columns) > _FIT else ""
    left_out = f"; {as_html(figure.left_out)} not shown" if figure.left_out else ""
    return (
        f'<div class="amp-scroll">{aside}<table class="amp-matrix" aria-label="{as_html(figure.label)}">'
        f'<thead><tr><th scope="col">module</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<div class="amp-matrix-key">{key}</div><div class="amp-place">{as_html(figure.unit)}{left_out}</div>'
    )


def _row(row: MatrixRow) -> str:
    hover = f' title="{as_html(row.kind, 80)}"' if row.kind else ""
    name = as_html(module_words(row.name)).replace(".", ".<wbr>")
    return f'<tr><th scope="row"{hover}>{name}</th>{"".join(map(_cell, row.cells))}</tr>'


def _cell(cell: Cell) -> str:
    number = f"<b>{as_html(cell.number)}</b> " if cell.number else ""
    style = f' style="--part:{cell.weight:.2f}"' if cell.weight else ""
    return f'<td class="{cell.kind}"{style} title="{as_html(cell.hover)}">{number}{as_html(cell.words)}</td>'
