"""The magnitudes an op read and wrote, as powers of two against what each dtype can hold."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from markup import as_label
from palette import ALARM, HAIRLINE, MARK, dtype_color
from phrases import trouble
from plotly.subplots import make_subplots

from ampscope.analysis.dtypes import FORMATS, Format
from ampscope.analysis.results import Operand
from charts.bands import BAND_HEIGHT, BANDS, draw_bands
from charts.canvas import entitle

#: Powers of two left free on either side.
_MARGIN = 4
#: Heights in pixels; a panel's two lines of text stand in the gap above it.
_PANEL, _GAP, _HEAD, _FOOT = 120, 50, 50, 60
_STRIDES = (4, 8, 16, 32, 64, 128, 256, 512)
_LABELS = 16


def exponents_figure(operands: Sequence[Operand]) -> go.Figure | None:
    """One histogram for each operand that was counted, and the dtypes' ranges below; None when none has a value."""
    shown = [operand for operand in operands if any(operand.exp_counts) or trouble(operand)]
    if not any(any(operand.exp_counts) for operand in shown):
        return None
    low, high = _extent(shown)
    figure = _frame(len(shown))
    for row, operand in enumerate(shown, start=1):
        _draw_operand(figure, row, operand)
    draw_bands(figure, len(shown) + 1, low, high)
    _label_axis(figure, len(shown) + 1, low, high)
    return figure


def _extent(operands: Sequence[Operand]) -> tuple[int, int]:
    """Powers of two from the smallest to the largest magnitude, and float16's range in any case."""
    half = FORMATS["float16"]
    counted = [(operand.exp_low or 0, len(operand.exp_counts)) for operand in operands if any(operand.exp_counts)]
    lows = [low for low, _ in counted]
    highs = [low + bins for low, bins in counted]
    return min(half.lowest, *lows) - _MARGIN, max(half.top, *highs) + _MARGIN


def _frame(panels: int) -> go.Figure:
    heights = [_PANEL] * panels + [BAND_HEIGHT * len(BANDS)]
    total = sum(heights) + _GAP * panels
    figure = make_subplots(
        rows=panels + 1, cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=_GAP / total
    )
    figure.update_layout(
        height=total + _HEAD + _FOOT,
        margin={"l": 84, "r": 16, "t": _HEAD, "b": _FOOT},
        showlegend=False,
        barmode="overlay",
        dragmode=False,
    )
    return figure


def _draw_operand(figure: go.Figure, row: int, operand: Operand) -> None:
    entitle(figure, row, _title(operand), lift=16)
    figure.add_trace(_bars(operand), row=row, col=1)
    if any(operand.exp_counts):
        figure.update_yaxes(rangemode="tozero", nticks=4, ticksuffix=" %", fixedrange=True, row=row, col=1)
    else:
        _say_empty(figure, row)
    own = FORMATS.get(operand.dtype)
    if own is not None:
        _draw_limits(figure, row, own)


def _bars(operand: Operand) -> go.Bar:
    low, total = operand.exp_low or 0, sum(operand.exp_counts) or 1
    bins = list(enumerate(operand.exp_counts, start=low))
    return go.Bar(
        x=[power + 0.5 for power, _ in bins],
        y=[100 * count / total for _, count in bins],
        width=0.9,
        marker_color=dtype_color(operand.dtype),
        customdata=[[power, power + 1, count] for power, count in bins],
        hovertemplate=(
            "magnitude 2<sup>%{customdata[0]}</sup> to 2<sup>%{customdata[1]}</sup><br>"
            "%{customdata[2]:,d} elements, %{y:.2f} %<extra></extra>"
        ),
    )


def _say_empty(figure: go.Figure, row: int) -> None:
    place = {"xref": "x domain", "yref": "y domain", "x": 0.1, "xanchor": "left", "y": 0.5}
    figure.add_annotation(text="no finite value other than 0", showarrow=False, row=row, col=1, **place)
    figure.update_yaxes(visible=False, range=[0, 1], fixedrange=True, row=row, col=1)


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


def _label_axis(figure: go.Figure, rows: int, low: int, high: int) -> None:
    stride = next((stride for stride in _STRIDES if (high - low) / stride <= _LABELS), _STRIDES[-1])
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
