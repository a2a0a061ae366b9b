"""What each dtype can hold, as bands over powers of two."""

from __future__ import annotations

import plotly.graph_objects as go
from palette import dtype_color, ink_on

from ampscope.analysis.dtypes import FORMATS, Format

#: The dtypes that are told apart, the narrowest first.
BANDS = ("float16", "bfloat16", "float32")
BAND_HEIGHT = 34
#: How much paler the subnormal range is: it holds fewer and fewer digits.
_PALE = 0.65


def draw_bands(figure: go.Figure, row: int, low: int, high: int) -> None:
    """For each dtype its normal range in full colour and its subnormal range paler, cut to ``low`` and ``high``."""
    for place, name in enumerate(reversed(BANDS)):
        own = FORMATS[name]
        for start, stop, full in ((own.lowest, own.normal, False), (own.normal, own.top, True)):
            left, right = max(start, low), min(stop, high)
            if left < right:
                figure.add_trace(_band(own, place, left, right, full=full), row=row, col=1)
    figure.update_yaxes(
        tickvals=list(range(len(BANDS))),
        ticktext=list(reversed(BANDS)),
        range=[-0.5, len(BANDS) - 0.5],
        showgrid=False,
        fixedrange=True,
        row=row,
        col=1,
    )


def _band(own: Format, place: int, left: int, right: int, *, full: bool) -> go.Bar:
    return go.Bar(
        x=[right - left],
        base=[left],
        y=[place],
        orientation="h",
        width=0.7,
        marker={"color": dtype_color(own.name), "opacity": 1.0 if full else _PALE},
        text=[f"normal numbers, 2<sup>{own.normal}</sup> to 2<sup>{own.top}</sup>" if full else "subnormal"],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": ink_on(own.name), "size": 11},
        hovertemplate=f"{own.name}: {'full precision' if full else 'fewer and fewer digits'}<extra></extra>",
    )
