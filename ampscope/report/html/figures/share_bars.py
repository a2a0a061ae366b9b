"""Paints bars that add up to a whole; what has no room for its words says them under the pointer."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ampscope.report.figures.precision_bars import Bar, Part, ShareBars
from ampscope.report.html.markup import as_html, link_html


def share_bars_html(figure: ShareBars, *, links: Sequence[str] = ()) -> str:
    """The figure; the name of each bar leads to one of ``links``, where they are given."""
    leading = [*links, *[""] * len(figure.bars)]
    bars = "".join(map(_bar, figure.bars, leading))
    left_out = f"; {figure.left_out} not shown" if figure.left_out else ""
    named = (
        f'<span><i style="background:{color}"></i>{as_html(dtype, 24)}</span>' for dtype, color in figure.key.items()
    )
    key = f'<div class="amp-matrix-key">{"".join(named)}</div>'
    return f'<div class="amp-shares">{bars}</div><div class="amp-place">{figure.unit}{left_out}</div>{key}'


def _bar(bar: Bar, to: str) -> str:
    parts = "".join(map(_part, bar.parts))
    name = as_html(bar.name, 34)
    name = link_html(to, name)
    drawn = f'<div class="amp-share">{parts}</div>'
    if to:  # the name leads there by the keyboard already
        drawn = (
            f'<a class="amp-share" href="{html.escape(to)}" target="_self" tabindex="-1" aria-hidden="true">{parts}</a>'
        )
    return f'<span class="amp-share-name">{name}</span>{drawn}'


def _part(part: Part) -> str:
    style = f"width:{100 * part.share:.2f}%;background:{part.color};color:{part.ink}"
    words = as_html(part.words, 40) if part.is_labelled else ""
    return f'<span style="{style}" title="{as_html(part.hover, 120)}">{words}</span>'
