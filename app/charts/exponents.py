"""The magnitudes an op read and wrote, as powers of two against what each dtype can hold."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from markup import as_label
from palette import ALARM, HAIRLINE, MARK, dtype_color, ink_on
from phrases import trouble
from plotly.subplots import make_subplots

from ampscope.analysis.dtypes import FORMATS, Format
from ampscope.analysis.results import Operand
from charts.canvas import entitle

_BANDS = ("float16", "bfloat16", "float32")
_PANEL = 120
_BAND = 34
_MARGIN = 4
_TITLE = 50


def exponents_figure(operands: Sequence[Operand]) -> go.Figure | None:
    """One histogram for each operand that has counts, and the dtypes' ranges below; None when none has."""
    measured = [operand for operand in operands if operand.exp_low is not None and any(operand.exp_counts)]
    if not measured:
        return None
    low, high = _extent(measured)
    figure = _frame(len(measured))
    for row, operand in enumerate(measured, start=1):
        _draw_operand(figure, row, operand)
    _draw_bands(figure, len(measured) + 1, low, high)
    _label_axis(figure, len(measured) + 1, low, high)
    return figure


def _extent(operands: Sequence[Operand]) -> tuple[int, int]:
    """Powers of two from the smallest to the largest magnitude, and float16's range in any case."""
    half = FORMATS["float16"]
    lows = [operand.exp_low or 0 for operand in operands]
    highs = [(operand.exp_low or 0) + len(operand.exp_counts) for operand in operands]
    return min(half.lowest, *lows) - _MARGIN, max(half.top, *highs) + _MARGIN


def _frame(panels: int) -> go.Figure:
    heights = [_PANEL] * panels + [_BAND * len(_BANDS)]
    total = sum(heights) + _TITLE * panels
    figure = make_subplots(
        rows=panels + 1, cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=_TITLE / total
    )
    figure.update_layout(
        height=total + 90,
        margin={"l": 84, "r": 16, "t": 50, "b": 60},
        showlegend=False,
        barmode="overlay",
        dragmode=False,
    )
    return figure


def _draw_operand(figure: go.Figure, row: int, operand: Operand) -> None:
    low = operand.exp_low or 0
    total = sum(operand.exp_counts)
    powers = list(range(low, low + len(operand.exp_counts)))
    figure.add_trace(
        go.Bar(
            x=[power + 0.5 for power in powers],
            y=[100 * count / total for count in operand.exp_counts],
            width=0.9,
            marker_color=dtype_color(operand.dtype),
            customdata=[[power, power + 1, count] for power, count in zip(powers, operand.exp_counts, strict=True)],
            hovertemplate=(
                "magnitude 2<sup>%{customdata[0]}</sup> to 2<sup>%{customdata[1]}</sup><br>"
                "%{customdata[2]:,d} elements, %{y:.2f} %<extra></extra>"
            ),
        ),
        row=row,
        col=1,
    )
    entitle(figure, row, _title(operand), lift=16)
    figure.update_yaxes(rangemode="tozero", nticks=4, ticksuffix=" %", fixedrange=True, row=row, col=1)
    own = FORMATS.get(operand.dtype)
    if own is not None:
        _draw_limits(figure, row, own)


def _title(operand: Operand) -> str:
    facts = f"{as_label(operand.dtype, 20)} {as_label(operand.shape, 30)}"
    wrong = trouble(operand)
    alarm = f"   <span style='color:{ALARM}'>and {wrong}</span>" if wrong else ""
    return f"<b>{as_label(operand.role, 30)}</b>   {facts}{alarm}"


def _draw_limits(figure: go.Figure, row: int, own: Format) -> None:
    """Lines where the operand's own dtype overflows and where its values vanish."""
    line = {"width": 1.5, "dash": "dot", "color": MARK}
    for power, text in ((own.lowest, "vanishes below"), (own.top, "overflows above")):
        note = {"text": text, "font": {"size": 11}, "xanchor": "center"}
        figure.add_vline(x=power, line=line, annotation=note, annotation_position="top", row=row, col=1)


def _draw_bands(figure: go.Figure, row: int, low: int, high: int) -> None:
    """For each dtype its normal range in full colour and its subnormal range paler."""
    for place, name in enumerate(reversed(_BANDS)):
        own = FORMATS[name]
        for start, stop, full in ((own.lowest, own.normal, False), (own.normal, own.top, True)):
            left, right = max(start, low), min(stop, high)
            if left < right:
                _draw_band(figure, row, place, name=name, left=left, right=right, full=full)
    figure.update_yaxes(
        tickvals=list(range(len(_BANDS))),
        ticktext=list(reversed(_BANDS)),
        range=[-0.5, len(_BANDS) - 0.5],
        showgrid=False,
        fixedrange=True,
        row=row,
        col=1,
    )


def _draw_band(figure: go.Figure, row: int, place: int, *, name: str, left: int, right: int, full: bool) -> None:
    figure.add_trace(
        go.Bar(
            x=[right - left],
            base=[left],
            y=[place],
            orientation="h",
            width=0.7,
            marker={"color": dtype_color(name), "opacity": 1.0 if full else 0.65},
            text=[_range_words(FORMATS[name]) if full else "subnormal"],
            textposition="inside",
            insidetextanchor="middle",
            insidetextfont={"color": ink_on(name), "size": 11},
            hovertemplate=f"{name}: {'full precision' if full else 'fewer and fewer digits'}<extra></extra>",
        ),
        row=row,
        col=1,
    )


def _range_words(own: Format) -> str:
    return f"normal numbers, 2<sup>{own.normal}</sup> to 2<sup>{own.top}</sup>"


def _label_axis(figure: go.Figure, rows: int, low: int, high: int) -> None:
    stride = next(stride for stride in (4, 8, 16, 32, 64, 128, 256, 512) if (high - low) / stride <= 16)
    ticks = [power for power in range(low, high + 1) if power % stride == 0]
    figure.update_xaxes(
        tickvals=ticks,
        ticktext=[f"2<sup>{power}</sup>" for power in ticks],
        range=[low, high],
        gridcolor=HAIRLINE,
        zeroline=False,
        fixedrange=True,
    )
    figure.update_xaxes(title_text="magnitude of the values", row=rows, col=1)
