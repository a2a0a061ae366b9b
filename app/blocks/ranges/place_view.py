"""One place close up: in numbers, over steps with where it is going, and its exponents against each dtype."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.precision.ranges.place_detail import PlaceDetail, Seen
from ampscope.report.figures.course import course_figure
from ampscope.report.figures.magnitudes import LABEL, WITH_FLOAT8, magnitudes
from ampscope.report.html.figures.ops import magnitudes_html
from ampscope.report.numbers import UNMEASURED, count, share, value
from ampscope.report.safe_text import place, short
from ampscope.report.wording import ranges_words
from blocks.basics.figure import figure, show_figure
from blocks.basics.page_links import link_row, to_plan, to_precision, to_replay
from blocks.basics.text import heading, paragraph
from blocks.basics.tiles import tiles
from charts.course import course_chart


def place_view(seen: PlaceDetail) -> None:
    """The place with its step."""
    heading("One place close up")
    row = seen.row
    where = f" ({place(row.source)})" if row.source else ""
    paragraph(f"{ranges_words.place_words(row)}, {row.phase}, {row.dtype}{where}".replace(", ,", ","), 400)
    tiles(facts(seen))
    course = course_figure(seen, marked=seen.seen.step if seen.seen else None)
    show_figure(course_chart(course), "course", short(ranges_words.place_words(row), 80), course.label)
    ways_onward(seen)
    exponents(seen)


def facts(seen: PlaceDetail) -> list[tuple[str, str]]:
    """Lists the facts known of a place, most asked first."""
    row = seen.row
    headroom = "none left" if row.overflowed else f"{ranges_words.bits(row.headroom_bits)} bits"
    lost = share(row.underflow_share, missing=UNMEASURED)
    found = [
        ("headroom to overflow", headroom if row.headroom_bits is not None else UNMEASURED),
        ("largest magnitude", value(row.largest, missing=UNMEASURED)),
        ("bits of growth in 100 steps", ranges_words.growth(row) or "too few steps"),
        ("overflowed", ranges_words.overflows(row).removeprefix("overflowed "))
        if row.overflowed
        else ("overflow foreseen", ranges_words.forecast(row) or "none"),
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
    name = short(ranges_words.place_words(seen.row), 60)
    with figure("magnitudes", f"{name} at step {count(counted.step)}", LABEL):
        st.html(magnitudes_html(drawn))
    st.caption(f"Across: magnitudes; up: share of the fullest bin.{_otherwise(counted, seen.seen)}")


def _otherwise(counted: Seen, asked: Seen | None) -> str:
    if asked is None or asked.step == counted.step:
        return ""
    return f" At step {count(asked.step)} they were not counted; this is the nearest step at which they were."
