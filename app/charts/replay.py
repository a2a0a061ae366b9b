"""A traced step from its first op to its last: magnitudes against what the dtype of each op holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.analysis.numerics.arrays import FloatArray
from ampscope.analysis.replay.track import Stretch, Track
from ampscope.report.html.markup import as_label
from ampscope.report.numbers import power_of_two
from ampscope.report.palette import ALARM, CURVE, HAIRLINE, MARK, SEVERITIES, SHADE, dtype_color
from ampscope.trace.dtypes import FINFO
from ampscope.trace.vocabulary import Severity

#: Pixels; the page lays its cursor over the figure by them.
LEFT, RIGHT, TOP, FOOT = 96, 12, 24, 34
PANEL, LANE = 190, 22
#: Powers of two shown at least, float16's range with a little air, and at most: a mask of float32's lowest number
#: would squeeze all else. A band that goes further runs out of the panel.
_LOW, _HIGH = -28.0, 20.0
_LOWEST, _HIGHEST = -52.0, 40.0
_THIN = 0.8
#: Dtypes whose range is smaller than that of float32.
_NARROW = tuple(name for name, info in FINFO.items() if info.top < FINFO["float32"].top)
#: A stretch of modules narrower than this share of the step has no room for its name.
_NAMED = 0.05
#: Steps up to this long get a label for every op.
_COUNTED = 12
_WARNING = SEVERITIES[Severity.WARNING]


@dataclass(frozen=True, slots=True)
class Marks:
    """A lane of marks below the panel."""

    name: str
    positions: Sequence[int]
    color: str


@dataclass(frozen=True, slots=True, eq=False)
class Counterpart:
    """Another step in the columns of this one."""

    largest: FloatArray
    differing: Sequence[int]  #: columns


def track_figure(track: Track, names: Sequence[str], other: Counterpart | None = None) -> go.Figure:
    """The track; clicking anywhere on it selects a point whose ``customdata`` is a position.

    Args:
        track: What to draw.
        names: Escaped, for each column, what its most telling op is.
        other: Another step to be drawn as a line, with a lane for where it differs.
    """
    lanes = _lanes(track, other)
    low, high = _extent(track)
    figure = _frame(len(lanes) + bool(track.modules))
    _draw_ranges(figure, track, low, high)
    _draw_values(figure, track)
    if other is not None:
        _draw_other(figure, track, other)
    _draw_limits(figure, track)
    _draw_lanes(figure, track, lanes)
    _draw_targets(figure, track, names, low, high)
    _draw_phases(figure, track)
    _label(figure, track, low, high)
    return figure


def height(track: Track, other: Counterpart | None = None) -> int:
    """The figure's height in pixels."""
    return TOP + PANEL + FOOT + LANE * (len(_lanes(track, other)) + bool(track.modules))


def _lanes(track: Track, other: Counterpart | None) -> list[Marks]:
    """A lane for each kind of mark that occurs."""
    flags = (
        (track.nonfinite, "NaN or inf", ALARM),
        (track.intended, "intended", MARK),
        (track.near, "near its limit", _WARNING),
        (track.cast, "converted", MARK),
    )
    lanes = [Marks(name, track.first[found].tolist(), color) for found, name, color in flags if found.any()]
    differing = list(other.differing) if other else []
    return [*lanes, *([Marks("differs", track.first[differing].tolist(), CURVE)] if differing else [])]


def _frame(lanes: int) -> go.Figure:
    heights = [PANEL, max(LANE * lanes, 1)]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=0)
    figure.update_layout(
        height=TOP + PANEL + FOOT + LANE * lanes,
        margin={"l": LEFT, "r": RIGHT, "t": TOP, "b": FOOT},
        showlegend=False,
        barmode="overlay",
        bargap=0,
        dragmode=False,
        hovermode="closest",
        clickmode="event+select",
    )
    return figure


def _extent(track: Track) -> tuple[float, float]:
    low, high = track.extent or (_LOW, _HIGH)
    return max(min(_LOW, low), _LOWEST) - 1, min(max(_HIGH, high), _HIGHEST) + 1


@dataclass(frozen=True, slots=True)
class _Block:
    """A bar over some ops: centre and width in positions, bottom and top on the axis."""

    centre: float
    width: float
    bottom: float
    top: float


def _blocks(track: Track, bounds: Callable[[int], tuple[float, float]], columns: Iterable[int]) -> list[_Block]:
    """A block for each of the ``columns``, between the ``bounds`` that are given for it."""
    ends = [*track.first[1:].tolist(), track.ops]
    starts = track.first.tolist()
    return [_Block((starts[i] + ends[i] - 1) / 2, ends[i] - starts[i], *bounds(i)) for i in columns]


def _bars(blocks: Sequence[_Block], color: str, opacity: float = 1.0) -> go.Bar:
    same = {"marker": {"opacity": opacity}}  # a click dims nothing
    return go.Bar(
        x=[one.centre for one in blocks],
        width=[one.width for one in blocks],
        base=[one.bottom for one in blocks],
        y=[one.top - one.bottom for one in blocks],
        marker={"color": color, "opacity": opacity, "line": {"width": 0}},
        selected=same,
        unselected=same,
        hoverinfo="skip",
    )


def _draw_ranges(figure: go.Figure, track: Track, low: float, high: float) -> None:
    """Behind each column what its dtype holds; where something is not finite, an alarm over the whole height."""

    def held(i: int) -> tuple[float, float]:
        return _clip(track.floor[i], low, high, low), _clip(track.limit[i], low, high, high)

    columns = range(len(track.first))
    for dtype in dict.fromkeys(track.dtype):
        mine = [i for i in columns if track.dtype[i] == dtype and dtype and not track.nonfinite[i]]
        figure.add_trace(_bars(_blocks(track, held, mine), dtype_color(dtype), 0.16), row=1, col=1)
    bad = [i for i in columns if track.nonfinite[i]]
    figure.add_trace(_bars(_blocks(track, lambda _: (low, high), bad), ALARM, 0.22), row=1, col=1)


def _draw_values(figure: go.Figure, track: Track) -> None:
    """The band from the smallest to the largest magnitude; a thin one where only the largest is known."""

    def band(i: int) -> tuple[float, float]:
        top = float(track.largest[i])
        return min(_clip(track.smallest[i], -1e9, 1e9, top), top - _THIN), top

    for dtype in dict.fromkeys(track.dtype):
        mine = [i for i, name in enumerate(track.dtype) if name == dtype and not math.isnan(track.largest[i])]
        figure.add_trace(_bars(_blocks(track, band, mine), dtype_color(dtype)), row=1, col=1)


def _draw_other(figure: go.Figure, track: Track, other: Counterpart) -> None:
    """The other step's largest magnitudes as a line."""
    line = {"color": CURVE, "width": 2, "shape": "hvh"}
    centres = [one.centre for one in _blocks(track, lambda _: (0, 0), range(len(track.first)))]
    values = [None if math.isnan(value) else float(value) for value in other.largest]
    figure.add_trace(go.Scatter(x=centres, y=values, mode="lines", line=line, hoverinfo="skip"), row=1, col=1)


def _draw_limits(figure: go.Figure, track: Track) -> None:
    """Lines where narrow dtypes that ran overflow and vanish, named on the spot."""
    for dtype in [name for name in _NARROW if name in track.dtype]:
        own = FINFO[dtype]
        for power, words in ((own.top, "overflows above"), (own.lowest, "vanishes below")):
            note = {
                "text": f"{dtype} {words} {power_of_two(power)}",
                "font": {"size": 11, "color": dtype_color(dtype)},
                "xanchor": "right",
                "yanchor": "bottom" if power > 0 else "top",
                "showarrow": False,
            }
            line = {"width": 1.5, "dash": "dot", "color": dtype_color(dtype)}
            figure.add_hline(y=power, line=line, annotation=note, row=1, col=1)


def _draw_targets(figure: go.Figure, track: Track, names: Sequence[str], low: float, high: float) -> None:
    """Invisible columns over the whole height: what a pointer finds."""
    bars = _bars(_blocks(track, lambda _: (low, high), range(len(track.first))), "rgba(0,0,0,0)")
    bars.update(customdata=track.focus.tolist(), hovertext=list(names), hoverinfo="text")
    figure.add_trace(bars, row=1, col=1)


def _draw_lanes(figure: go.Figure, track: Track, lanes: Sequence[Marks]) -> None:
    labels = ["modules"] * bool(track.modules) + [lane.name for lane in reversed(lanes)]
    if track.modules:
        _draw_modules(figure, track)
    for place, lane in enumerate(reversed(lanes), start=len(labels) - len(lanes)):
        x = [end for at in lane.positions for end in (at, at, None)]
        y = [end for _ in lane.positions for end in (place - 0.3, place + 0.3, None)]
        line = {"color": lane.color, "width": 2}
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line=line, hoverinfo="skip"), row=2, col=1)
    figure.update_yaxes(
        tickvals=list(range(len(labels))),
        ticktext=labels,
        range=[-0.5, max(len(labels), 1) - 0.5],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
        row=2,
        col=1,
    )


def _draw_modules(figure: go.Figure, track: Track) -> None:
    for stripe in (0, 1):
        mine = [one for at, one in enumerate(track.modules) if at % 2 == stripe]
        blocks = [_Block((one.first + one.last) / 2, one.last - one.first + 1, -0.42, 0.42) for one in mine]
        bars = _bars(blocks, (SHADE, HAIRLINE)[stripe])
        names = [as_label(one.name, 60) or "outside modules" for one in mine]
        bars.update(
            text=[_fitting(one, track.ops) for one in mine],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            insidetextfont={"color": MARK, "size": 11},
            hovertext=names,
            hoverinfo="text",
            customdata=[one.first for one in mine],
        )
        figure.add_trace(bars, row=2, col=1)


def _fitting(one: Stretch, ops: int) -> str:
    """The end of a name as long as there is room for it."""
    part = (one.last - one.first + 1) / max(ops, 1)
    return as_label(one.name.rpartition(".")[2] if part < 3 * _NAMED else one.name, int(130 * part)) * (part > _NAMED)


def _draw_phases(figure: go.Figure, track: Track) -> None:
    """Where forward ends and backward begins."""
    for one in track.phases:
        if one.first:
            figure.add_vline(x=one.first - 0.5, line={"color": MARK, "width": 1}, row=1, col=1)
        if one.last - one.first > _NAMED * track.ops:
            where = {"x": one.first, "xref": "x", "y": 1, "yref": "y domain", "xanchor": "left", "yanchor": "bottom"}
            figure.add_annotation(text=as_label(one.name, 20), showarrow=False, font={"size": 12}, **where)


def _label(figure: go.Figure, track: Track, low: float, high: float) -> None:
    stride = next((stride for stride in (8, 16, 32, 64) if (high - low) / stride <= 7), 128)
    ticks = [power for power in range(math.ceil(low), math.floor(high) + 1) if power % stride == 0]
    labels = [power_of_two(power) for power in ticks]
    figure.update_yaxes(
        tickvals=ticks,
        ticktext=labels,
        range=[low, high],
        gridcolor=HAIRLINE,
        zeroline=False,
        fixedrange=True,
        row=1,
        col=1,
    )
    figure.update_xaxes(
        range=[-0.5, max(track.ops, 1) - 0.5], showgrid=False, zeroline=False, fixedrange=True, tickformat=",", nticks=8
    )
    if track.ops <= _COUNTED:
        figure.update_xaxes(tick0=0, dtick=1)  # there is no half an op


def _clip(value: float, low: float, high: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else min(max(float(value), low), high)
