"""Recorded ranges are shown as a heat map, as a table of the closest places, and one place close up."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from ampscope.analysis.precision.ranges.heat_map import HeatMap, Measure, View
from ampscope.analysis.precision.ranges.measured import MeasuredRun
from ampscope.analysis.precision.ranges.place_detail import LargestValue, PlaceDetail
from ampscope.analysis.precision.ranges.ranges import RangeRow, Ranges
from ampscope.report import precision_words
from ampscope.report.figures.course_figure import course_figure
from ampscope.report.figures.heat_map_figure import heat_figure
from ampscope.report.figures.magnitudes_figure import LABEL, WITH_FLOAT8, magnitudes
from ampscope.report.html.ops_svg import magnitudes_html
from ampscope.report.numbers import UNMEASURED, count, share, value
from ampscope.report.safe_text import place, short
from blocks.choices import not_there
from blocks.components.data_table import Cell
from blocks.components.heat_map import heat_map
from blocks.figure import figure, show_figure
from blocks.page_links import link_row, to_plan, to_precision, to_replay
from blocks.table import table
from blocks.text import heading, keep_room, paragraph, tiles
from charts import course_chart
from data.run_results import heat_map_of, measured_of
from data.run_snapshot import RunSnapshot
from state import get_number, param_in_address, set_params

_COLUMNS = (
    "Place",
    "Headroom, bits",
    "Phase",
    "Type",
    "Line",
    "Largest",
    "Bits in 100 steps",
    "Overflows at",
    "Subnormal",
    "Zero",
    "Not in float32",
)
_NUMERIC = ("Headroom, bits", "Largest", "Bits in 100 steps", "Subnormal", "Zero", "Not in float32")


def closest_table(seen: Ranges, on_pick: Callable[[str, int | None], None]) -> None:
    """The table; ``on_pick`` gets the key of the place that was clicked."""
    rows = seen.rows
    table(
        "Closest to overflow",
        _COLUMNS,
        [_cells(row) for row in rows],
        numeric=_NUMERIC,
        on_pick=lambda number: on_pick(rows[number].key, None),
    )
    st.caption(
        "Click on a place to see it close up. Gradients carry the loss scale, which makes room for them by itself; "
        "they come after the rest, and what cannot grow comes last. Subnormal is the share of the non-zero values, "
        "zero that of all; not in float32: zero though float32 keeps them."
    )


def _cells(row: RangeRow) -> tuple[str | Cell, ...]:
    return (
        precision_words.place_words(row),
        _number(row.headroom_bits, "" if row.headroom_bits is None else f"{row.headroom_bits:.1f}"),
        row.phase,
        row.dtype,
        precision_words.line(row),
        _number(row.largest, value(row.largest, missing="")),
        _number(row.bits_per_step, precision_words.growth(row)),
        precision_words.forecast(row),
        *(_number(part, share(part, missing="")) for part in (row.underflow_share, row.zero_share, row.flushed_share)),
    )


def _number(key: float | None, words: str) -> Cell:
    return Cell(words, key)


#: Pixels: a row, and the steps and the key below them.
_ROW, _KEY = 20, 44
_CURVES = {
    Measure.HEADROOM: "its headroom over the steps; at the top it overflows",
    Measure.UNDERFLOW: "its distance to underflow over the steps; at the top all is subnormal",
    Measure.SUBNORMAL: "its share of subnormal values over the steps",
}


def module_map(
    run: RunSnapshot, key: str, title: str, on_pick: Callable[[str, int | None], None], view: View, *, chosen: str = ""
) -> HeatMap:
    """The heat map, of which a click on a cell picks the place that is closest there.

    Args:
        run: The run.
        key: The element's.
        title: What it shows, in a word or two.
        on_pick: Gets the place's key, and the step.
        view: What it shows.
        chosen: The key of the place whose cells are marked.
    """
    seen = heat_map_of(run, view)
    drawn = heat_figure(seen, measured_of(run), as_tree=not view.closest_first)
    if not drawn.rows:
        return seen
    end = view.measure is not Measure.SUBNORMAL
    keep_room(key, _ROW * len(drawn.rows) + _KEY)
    with figure(key, title, drawn.label):
        heat_map(key, drawn, on_pick, chosen=chosen, curve=_CURVES[view.measure], with_end=end)
    if drawn.left_out:
        st.caption(f"Not shown: {drawn.left_out}.")
    return seen


_PICKED = "_ranges_picked"


def pick(place: str, step: int | None) -> None:
    """Note a click: it takes effect when the page is drawn next."""
    st.session_state[_PICKED] = place, step


def take_pick() -> tuple[str, int | None] | None:
    """Returns the place that was clicked since the page was drawn, once; None without a click."""
    picked = st.session_state.pop(_PICKED, None)
    return picked if isinstance(picked, tuple) else None


def picked_place(found: MeasuredRun, closest: str) -> tuple[str, int | None]:
    """The key of the place to look at, and the step if one was asked for.

    Args:
        found: All places.
        closest: The key of the place to begin with.
    """
    if (picked := take_pick()) is not None:
        set_params(place=picked[0], step=picked[1])
    asked = param_in_address("place")
    if asked is not None and any(each.place.key == asked for each in found.places):
        return asked, get_number("step")
    if asked is not None:
        not_there("Place", asked, "the closest one")
    return closest, None


def place_view(seen: PlaceDetail) -> None:
    """The place with its step."""
    heading("One place close up")
    row = seen.row
    where = f" ({place(row.source)})" if row.source else ""
    paragraph(f"{precision_words.place_words(row)}, {row.phase}, {row.dtype}{where}".replace(", ,", ","), 400)
    tiles(facts(seen))
    course = course_figure(seen, marked=seen.seen.step if seen.seen else None)
    show_figure(course_chart(course), "course", short(precision_words.place_words(row), 80), course.label)
    ways_onward(seen)
    exponents(seen)


def facts(seen: PlaceDetail) -> list[tuple[str, str]]:
    """Lists the facts known of a place, most asked first."""
    row = seen.row
    headroom = "none left" if row.overflowed else f"{precision_words.bits(row.headroom_bits)} bits"
    lost = share(row.underflow_share, missing=UNMEASURED)
    found = [
        ("headroom to overflow", headroom if row.headroom_bits is not None else UNMEASURED),
        ("largest magnitude", value(row.largest, missing=UNMEASURED)),
        ("bits of growth in 100 steps", precision_words.growth(row) or "too few steps"),
        ("overflowed", precision_words.overflows(row).removeprefix("overflowed "))
        if row.overflowed
        else ("overflow foreseen", precision_words.forecast(row) or "none"),
        ("subnormal, of the non-zero values", lost),
        ("recorded steps in which it ran", count(row.steps)),
    ]
    if row.scale is not None:
        found.insert(2, ("largest without the loss scale, newest step", value(row.unscaled, missing=UNMEASURED)))
    return found


def ways_onward(seen: PlaceDetail) -> None:
    """Links to the op in the step that is looked at."""
    if seen.seen is None:
        return
    with link_row():
        at = seen.seen
        to_replay(at.step, at.source, at.seq, f"Replay step {count(at.step)} at this op")
        if seen.row.module:
            to_precision(seen.row.module, at.step, at.source)
        to_plan()


def exponents(seen: PlaceDetail) -> None:
    """Shows the histogram of a place's values against what each dtype can hold."""
    counted = seen.counted
    drawn = magnitudes((counted.written,), bands=WITH_FLOAT8) if counted is not None else None
    if counted is None or drawn is None:
        paragraph(
            "There is no histogram: the exponents of its values were not counted in any recorded step. That is done "
            "for up to 256 outputs of a healthy step, by turns, and for all in a replay."
        )
        return
    heading(f"Its values at step {count(counted.step)}, against what each dtype can hold")
    name = short(precision_words.place_words(seen.row), 60)
    with figure("magnitudes", f"{name} at step {count(counted.step)}", LABEL):
        st.html(magnitudes_html(drawn))
    st.caption(f"Across: magnitudes; up: share of the fullest bin.{_otherwise(counted, seen.seen)}")


def _otherwise(counted: LargestValue, asked: LargestValue | None) -> str:
    if asked is None or asked.step == counted.step:
        return ""
    return f" At step {count(asked.step)} they were not counted; this is the nearest step at which they were."
