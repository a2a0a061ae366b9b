"""The track of a step with the cursor on it; a click on it moves the cursor."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import streamlit as st

from ampscope.analysis.replay.op_detail import OpLine
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.replay.track import columns_of, in_columns
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.html.markup import as_html, as_label
from ampscope.report.palette import dtype_color
from ampscope.trace.schema import Phase
from blocks.basics.figure import CONFIG
from blocks.debugger.cursor import Cursor
from charts.replay import FOOT, LEFT, RIGHT, TOP, Counterpart, height, track_figure
from data.cache import cached, identity
from data.run_snapshot import RunSnapshot
from data.step_results import KEPT, lockstep_of, recording_of, track_of

_KEY = "replay-track"
_PICKED = "_replay_picked"
#: Other halves of an op that are marked.
_OTHERS = 8


def step_track(
    run: RunSnapshot, step: TracedStep, against: TracedStep | None, cursor: Cursor, others: Sequence[OpLine]
) -> None:
    """The figure, which stays as it is while the cursor over it moves, and with it the marks of its ``others``."""
    figure, tall, ops, dtypes = _drawn(run, step, against)
    with st.container(gap=None):
        st.plotly_chart(
            figure,
            width="stretch",
            config=CONFIG,
            key=_KEY,
            on_select=lambda: _follow_click(cursor, ops),
            selection_mode=("points",),
        )
        _lay_cursor(cursor.position, others, ops, tall)
    st.html(_legend(dtypes, other=against is not None))


def _follow_click(cursor: Cursor, ops: int) -> None:
    """Go to the column that was clicked; a click on the one that is selected reports no point."""
    points = st.session_state[_KEY].selection.points
    if points:
        data = points[0].get("customdata")
        st.session_state[_PICKED] = data[0] if isinstance(data, list) else data
    position = st.session_state.get(_PICKED)
    if isinstance(position, int) and 0 <= position < ops:
        cursor.move(position)


@cached(identity, entries=KEPT)
def _drawn(
    run: RunSnapshot, step: TracedStep, against: TracedStep | None
) -> tuple[go.Figure, int, int, tuple[str, ...]]:
    """The figure, its height in pixels, the number of ops and their types: drawn once, it is there at every beat."""
    track, recording = track_of(run, step), recording_of(run, step)
    lock = lockstep_of(run, step, against) if against else None
    other = Counterpart(in_columns(track, lock.largest), columns_of(track, lock.notable).tolist()) if lock else None
    figure = track_figure(track, [_name(recording, int(at)) for at in track.focus], other)
    return figure, height(track, other), len(recording), tuple(sorted({*track.dtype} - {""}))


def _legend(dtypes: Sequence[str], *, other: bool) -> str:
    """What lies along the track, what its colours mean, and the line."""
    swatch = '&ensp;<i class="amp-swatch" style="background:{}"></i>{}'
    named = "".join(swatch.format(dtype_color(name), as_html(name, 24)) for name in dtypes)
    line = ". The line: the largest magnitudes of the other step" if other else ""
    return (
        f'<div class="amp-place">Magnitudes of what each op wrote, in the order in which they ran:{named}{line}</div>'
    )


def _lay_cursor(at: int, others: Sequence[OpLine], ops: int, tall: int) -> None:
    """Lines over the figure: moving them sends a few bytes, drawing the figure again a hundred thousand."""
    place = f"position:relative;height:0;margin:0 {RIGHT}px 0 {LEFT}px;pointer-events:none"
    high = f"bottom:{FOOT}px;height:{tall - FOOT - TOP + 6}px"
    marks = [f'<i class="amp-cursor" style="{_at(at, ops)};{high};border-left:2px solid"></i>']
    for other in others[:_OTHERS]:
        words = "its backward" if other.phase == Phase.BACKWARD else "its forward"
        marks.append(
            f'<i style="{_at(other.position, ops)};{high};border-left:2px dotted;opacity:0.7"></i>'
            f'<span style="{_at(other.position, ops)};bottom:2px;font-size:0.7rem;line-height:1;opacity:0.8;'
            f'transform:translateX(-50%);white-space:nowrap">{words if other is others[0] else ""}</span>'
        )
    st.html(f'<div style="{place}">{"".join(marks)}</div>')


def _at(position: int, ops: int) -> str:
    return f"position:absolute;left:{100 * (position + 0.5) / ops:.3f}%"


def _name(recording: Recording, position: int) -> str:
    site = recording.site_of(position)
    where = f"<br>{as_label(site.module, 60)}" if site.module else ""
    return f"op {int(recording.seq[position]):,}: {as_label(f'{site.op} {site.name}'.strip(), 60)}{where}"
