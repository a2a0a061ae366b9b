"""What ran in which dtype, as bars that add up to a whole and carry their own labels."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.analysis.precision.precision import PrecisionRow
from ampscope.report import numbers
from ampscope.report.html.markup import as_label
from ampscope.report.html.palette import dtype_color, ink_on
from ampscope.report.html.phrases import share, size

_BAR = 30
_ORDER = ("float16", "bfloat16", "float32", "float64")


def precision_figure(rows: Sequence[PrecisionRow], names: Sequence[str], *, by_bytes: bool = False) -> go.Figure:
    """A bar for each row, top to bottom as given, its segments the shares of each dtype."""
    figure = go.Figure()
    for dtype in _dtypes(rows):
        figure.add_trace(_segments(dtype, rows, by_bytes=by_bytes))
    labels = [as_label(name, 34) for name in names]
    figure.update_layout(
        barmode="stack",
        bargap=0.22,
        height=_BAR * len(rows) + 60,
        margin={"l": 8, "r": 16, "t": 8, "b": 48},
        showlegend=False,
        uniformtext={"minsize": 10, "mode": "hide"},
        dragmode=False,
    )
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=labels, autorange="reversed", automargin=True, showgrid=False
    )
    what = "share of the bytes written" if by_bytes else "share of the ops"
    figure.update_xaxes(range=[0, 100], ticksuffix=" %", title_text=what, fixedrange=True)
    return figure


def _dtypes(rows: Sequence[PrecisionRow]) -> list[str]:
    seen = {one.dtype for row in rows for one in row.shares}
    return sorted(seen, key=lambda dtype: (_ORDER.index(dtype) if dtype in _ORDER else len(_ORDER), dtype))


def _segments(dtype: str, rows: Sequence[PrecisionRow], *, by_bytes: bool) -> go.Bar:
    shares = [row.part(dtype, by_bytes=by_bytes) for row in rows]
    name = as_label(dtype, 20)
    return go.Bar(
        x=[100 * one for one in shares],
        y=list(range(len(rows))),
        orientation="h",
        marker={"color": dtype_color(dtype), "line": {"width": 0}},
        text=[f"{name} {share(one)}" if one else "" for one in shares],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": ink_on(dtype), "size": 12},
        customdata=[_hover(row, dtype) for row in rows],
        hovertemplate=f"%{{y}}<br>{name} %{{x:.1f}} %<br>%{{customdata}}<extra></extra>",
    )


def _hover(row: PrecisionRow, dtype: str) -> str:
    mine = next((one for one in row.shares if one.dtype == dtype), None)
    return f"{numbers.count(mine.ops, 'op')}, {size(mine.bytes)} written" if mine else ""
