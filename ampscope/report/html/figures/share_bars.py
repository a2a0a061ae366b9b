"""Paints bars that add up to a whole; what has no room for its words says them under the pointer."""

from __future__ import annotations

from ampscope.report.figures.precision_bars import Bar, Part, ShareBars
from ampscope.report.html.markup import as_html


def share_bars_html(figure: ShareBars) -> str:
    """The figure."""
    left_out = f"; {figure.left_out} not shown" if figure.left_out else ""
    return (
        f'<div class="amp-shares">{"".join(map(_bar, figure.bars))}</div>'
        f'<div class="amp-place">{figure.unit}{left_out}</div>'
    )


def _bar(bar: Bar) -> str:
    parts = "".join(map(_part, bar.parts))
    return f'<span class="amp-share-name">{as_html(bar.name, 34)}</span><div class="amp-share">{parts}</div>'


def _part(part: Part) -> str:
    style = f"width:{100 * part.share:.2f}%;background:{part.color};color:{part.ink}"
    words = as_html(part.words, 40) if part.is_labelled else ""
    return f'<span style="{style}" title="{as_html(part.hover, 120)}">{words}</span>'
