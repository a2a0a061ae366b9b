"""Paints ranks by steps as HTML: a row a rank, a coloured stretch for what happened; words are under the pointer."""

from __future__ import annotations

from ampscope.report.figures.rank_grid import GridRow, RankGrid, Stretch
from ampscope.report.html.markup import as_html

#: Pixels of a row, by how many there are.
_HEIGHTS = ((12, 20), (32, 12), (10_000, 7))


def rank_grid_html(figure: RankGrid) -> str:
    """The figure; nothing without rows."""
    if not figure.rows:
        return ""
    height = next(pixels for most, pixels in _HEIGHTS if len(figure.rows) <= most)
    rows = "".join(map(_row, figure.rows))
    ticks = "".join(f'<span style="left:{100 * at:.2f}%">{as_html(words)}</span>' for at, words in figure.ticks)
    key = "".join(f'<span><i class="{kind}"></i>{as_html(words)}</span>' for kind, words in figure.key)
    return (
        f'<figure class="amp-grid" style="--row:{height}px" aria-label="{as_html(figure.label)}">{rows}'
        f'<div class="amp-grid-row"><b></b><div class="amp-steps">{ticks}</div></div>'
        f'<figcaption class="amp-place">optimizer step</figcaption><div class="amp-grid-key">{key}</div></figure>'
    )


def _row(row: GridRow) -> str:
    cells = "".join(map(_stretch, row.stretches))
    return f'<div class="amp-grid-row"><b>{as_html(row.name)}</b><div class="amp-grid-cells">{cells}</div></div>'


def _stretch(stretch: Stretch) -> str:
    place = f"left:{100 * stretch.start:.3f}%;width:{100 * stretch.width:.3f}%"
    return f'<i class="{stretch.kind}" style="{place}" title="{as_html(stretch.hover)}"></i>'
