"""How large the tensors of an incident's op were in the recorded steps before it."""

from __future__ import annotations

from bisect import bisect_right

import streamlit as st

from ampscope.analysis.origin.step_graph import Closeup
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail
from ampscope.analysis.results import Incident
from ampscope.report.figures.course import course_figure
from ampscope.report.numbers import count, value
from ampscope.report.safe_text import short
from blocks.basics.figure import show_figure
from blocks.basics.page_links import rank_of, way_to
from blocks.basics.table import table
from blocks.basics.text import heading
from charts.course import course_chart
from data.recorded_places import recorded_before
from data.run_snapshot import RunSnapshot
from state.pages import Page

_COLUMNS = ("Tensor", "First recorded", "Largest then", "Last recorded up to it", "Largest at last")


def before_it(run: RunSnapshot, incident: Incident, closeup: Closeup) -> None:
    """The course of what the op gave, and where its operands began and ended; nothing where no step recorded them.

    Args:
        run: The run, seen from the incident's rank.
        incident: Its op.
        closeup: Who gave it its operands.
    """
    seen = recorded_before(run, incident, closeup)
    if not seen:
        return
    heading("Over the recorded steps")
    _, name, own = seen[0]
    course = course_figure(own, marked=incident.step)
    show_figure(course_chart(course), "before-it", f"Largest magnitude of {name}", f"{name}: {course.label}")
    st.caption(f"Drawn: {name}. Largest: the largest magnitude that is finite.")
    ways = [way_to(Page.RANGES, place=key, rank=rank_of(incident)) for key, *_ in seen]
    rows = [_row(name, each, incident.step) for _, name, each in seen]
    table("Largest magnitudes in the recorded steps up to it", _COLUMNS, rows, numeric=_COLUMNS[1:], ways=ways)


def _row(name: str, seen: PlaceDetail, step: int) -> tuple[str, ...]:
    steps, powers = seen.course.steps, seen.course.values
    last = bisect_right(steps, step) - 1
    where = short(f"{name} ({seen.row.module})" if seen.row.module else name, 90)
    return where, count(steps[0]), value(2.0 ** powers[0]), count(steps[last]), value(2.0 ** powers[last])
