"""The track of a step with the cursor on it; a click on it moves the cursor."""

from __future__ import annotations

import streamlit as st
from charts.replay import FOOT, LEFT, RIGHT, TOP, Counterpart, height, track_figure
from cursor import Cursor
from markup import as_label

from ampscope.analysis.replay import Recording
from ampscope.analysis.replay_lockstep import Lockstep
from ampscope.analysis.replay_track import Track, columns_of, in_columns
from blocks.plot import CONFIG

_KEY = "replay-track"


def replay_track(drawn: Track, seen: Recording, cursor: Cursor, lock: Lockstep | None) -> None:
    """The figure, which stays as it is while the cursor over it moves."""
    other = Counterpart(in_columns(drawn, lock.largest), columns_of(drawn, lock.notable).tolist()) if lock else None
    figure = track_figure(drawn, [_name(seen, int(at)) for at in drawn.focus], other)

    def picked() -> None:
        points = st.session_state[_KEY].selection.points
        data = points[0].get("customdata") if points else None
        position = data[0] if isinstance(data, list) else data
        if isinstance(position, int) and 0 <= position < len(seen):
            cursor.move(position)

    with st.container(gap=None):
        st.plotly_chart(figure, width="stretch", config=CONFIG, key=_KEY, on_select=picked, selection_mode=("points",))
        _lay_cursor((cursor.at + 0.5) / len(seen), height(drawn, other))
    if lock is not None:
        st.caption("The line: the largest magnitudes of the other step.")


def _lay_cursor(part: float, tall: int) -> None:
    """A line over the figure: moving it sends a few bytes, drawing the figure again a hundred thousand."""
    place = f"position:relative;height:0;margin:0 {RIGHT}px 0 {LEFT}px;pointer-events:none"
    line = f"position:absolute;left:{100 * part:.3f}%;bottom:{FOOT}px;height:{tall - FOOT - TOP + 6}px"
    st.html(f'<div style="{place}"><i class="amp-cursor" style="{line};border-left:2px solid"></i></div>')


def _name(seen: Recording, position: int) -> str:
    site = seen.site_of(position)
    where = f"<br>{as_label(site.module, 60)}" if site.module else ""
    return f"op {int(seen.seq[position]):,}: {as_label(f'{site.op} {site.name}'.strip(), 60)}{where}"
