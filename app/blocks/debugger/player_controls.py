"""The controls of the debugger: play, step, jump; each has a key on the keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from ampscope.analysis.numerics.arrays import IntArray
from ampscope.analysis.replay.lockstep import Lockstep
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.replay.seek import Kind, around, marked
from ampscope.report.numbers import count
from blocks.debugger.cursor import Cursor

#: Seconds between two beats of playing, and how long a whole step takes at normal speed.
BEAT, WHOLE = 0.4, 45.0
_HELP = {
    "N": "Where NaN or infinity begins that is not intended: nothing that the op read was so",
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


def jumps_in(recording: Recording, *, matches: IntArray | None, lockstep: Lockstep | None) -> list[Jump]:
    """Where one can jump: to marked ops, to ``matches`` of a search, and to what differs from another step."""
    jumps = [
        Jump("N", "NaN or inf", marked(recording, Kind.NONFINITE)),
        Jump("L", "near its limit", marked(recording, Kind.NEAR)),
        Jump("T", "conversion", marked(recording, Kind.CAST)),
        Jump("M", "module", marked(recording, Kind.MODULE)),
    ]
    if matches is not None:
        jumps.append(Jump("F", "found", matches))
    if lockstep is not None:
        jumps.append(Jump("D", "difference", lockstep.notable))
    return jumps


def player_controls(recording: Recording, cursor: Cursor, jumps: Sequence[Jump]) -> None:
    """The row of buttons; a click moves ``cursor`` before the page is drawn."""
    last = len(recording) - 1
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        _button("first", "Home", lambda: cursor.move(0), icon="first_page", tooltip="To the first op")
        _button(
            "back", "Left", lambda: cursor.move(max(cursor.position - 1, 0)), icon="chevron_left", tooltip="One op back"
        )
        _play(recording, cursor)
        _button(
            "on",
            "Right",
            lambda: cursor.move(min(cursor.position + 1, last)),
            icon="chevron_right",
            tooltip="One op on",
        )
        _button("last", "End", lambda: cursor.move(last), icon="last_page", tooltip="To the last op")
        st.html('<span class="amp-place">Next</span>', width="content")
        for jump in jumps:
            _jump(jump, cursor)
        _speed(recording, cursor)
        where = f"op {count(cursor.position + 1)} of {count(len(recording))}"
        st.html(f'<span class="amp-place">{where}</span>', width="content")


def _play(recording: Recording, cursor: Cursor) -> None:
    """Starting or stopping the beat needs the whole page once: a beat is set where a fragment is called."""
    label, icon = ("Pause", "pause") if cursor.playing else ("Play", "play_arrow")

    def toggle() -> None:
        if not cursor.playing and cursor.position >= len(recording) - 1:
            cursor.position = 0
        cursor.playing = not cursor.playing

    if _button("play", "P", toggle, label=label, icon=icon, tooltip="Play or pause", primary=True):
        st.rerun()


def _jump(jump: Jump, cursor: Cursor) -> None:
    target = around(jump.places, cursor.position)
    label = f"{jump.label} ({count(len(jump.places))})"
    tooltip = _HELP[jump.key] if target is not None else "There is none in this step"
    _button(jump.key, jump.key, lambda: cursor.move(target or 0), label=label, tooltip=tooltip, disabled=target is None)


def _speed(recording: Recording, cursor: Cursor) -> None:
    normal = max(len(recording) * BEAT / WHOLE, 1.0)
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
    tooltip: str = "",
    primary: bool = False,
    disabled: bool = False,
) -> bool:
    return st.button(
        label,
        key=f"replay-{key}",
        icon=f":material/{icon}:" if icon else None,
        shortcut=shortcut,
        help=tooltip,
        on_click=act,
        type="primary" if primary else "secondary",
        disabled=disabled,
    )
