"""The keys of the replay: play, step, jump; each has one on the keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st
from state.cursor import Cursor

from ampscope.analysis.numerics.arrays import IntArray
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.replay.seek import Kind, around, marked
from ampscope.report.numbers import count

#: Seconds between two beats of playing, and how long a whole step takes at normal speed.
BEAT, WHOLE = 0.4, 45.0
_TOLD = {
    "N": "Where NaN or infinity begins: not finite, though nothing it read was",
    "L": "Largest value above 1/8 of what the dtype holds",
    "T": "An op that only converts to another dtype",
    "M": "Where another module begins",
    "F": "An op that the search finds",
    "D": "Where the two steps part: another size, or finite in one alone",
}
_SPEEDS = {"slow": 0.25, "normal": 1.0, "fast": 4.0}


@dataclass(frozen=True, slots=True)
class Jump:
    """A button that leads to the next of certain places."""

    key: str  #: on the keyboard; Streamlit keeps C and R to itself
    label: str
    places: IntArray


def jumps(seen: Recording) -> list[Jump]:
    """Where one can jump in any recording."""
    return [
        Jump("N", "NaN or inf", marked(seen, Kind.NONFINITE)),
        Jump("L", "near its limit", marked(seen, Kind.NEAR)),
        Jump("T", "conversion", marked(seen, Kind.CAST)),
        Jump("M", "module", marked(seen, Kind.MODULE)),
    ]


def transport(seen: Recording, cursor: Cursor, wanted: Sequence[Jump]) -> None:
    """The row of buttons; a click moves ``cursor`` before the page is drawn."""
    last = len(seen) - 1
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        _button("first", "Home", lambda: cursor.move(0), icon="first_page", told="To the first op")
        _button("back", "Left", lambda: cursor.move(max(cursor.at - 1, 0)), icon="chevron_left", told="One op back")
        _play(seen, cursor)
        _button("on", "Right", lambda: cursor.move(min(cursor.at + 1, last)), icon="chevron_right", told="One op on")
        _button("last", "End", lambda: cursor.move(last), icon="last_page", told="To the last op")
        st.html('<span class="amp-place">Next</span>', width="content")
        for jump in wanted:
            _jump(jump, cursor)
        _speed(seen, cursor)
        where = f"op {count(cursor.at + 1)} of {count(len(seen))}"
        st.html(f'<span class="amp-place">{where}</span>', width="content")


def _play(seen: Recording, cursor: Cursor) -> None:
    """Starting or stopping the beat needs the whole page once: a beat is set where a fragment is called."""
    label, icon = ("Pause", "pause") if cursor.playing else ("Play", "play_arrow")

    def toggle() -> None:
        if not cursor.playing and cursor.at >= len(seen) - 1:
            cursor.at = 0
        cursor.playing = not cursor.playing

    if _button("play", "P", toggle, label=label, icon=icon, told="Play or pause", primary=True):
        st.rerun()


def _jump(jump: Jump, cursor: Cursor) -> None:
    target = around(jump.places, cursor.at)
    label = f"{jump.label} ({count(len(jump.places))})"
    told = _TOLD[jump.key] if target is not None else "There is none in this step"
    _button(jump.key, jump.key, lambda: cursor.move(target or 0), label=label, told=told, disabled=target is None)


def _speed(seen: Recording, cursor: Cursor) -> None:
    normal = max(len(seen) * BEAT / WHOLE, 1.0)
    names = list(_SPEEDS)
    picked = st.segmented_control(
        "Speed", names, default="normal", required=True, key="replay-speed", label_visibility="collapsed"
    )
    cursor.stride = normal * _SPEEDS[picked or "normal"]


def _button(
    key: str,
    shortcut: str,
    act: Callable[[], None],
    *,
    label: str = "",
    icon: str | None = None,
    told: str = "",
    primary: bool = False,
    disabled: bool = False,
) -> bool:
    return st.button(
        label,
        key=f"replay-{key}",
        icon=f":material/{icon}:" if icon else None,
        shortcut=shortcut,
        help=told,
        on_click=act,
        type="primary" if primary else "secondary",
        disabled=disabled,
    )
