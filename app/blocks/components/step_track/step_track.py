"""The track of a step, drawn and walked through in the browser, and the cursor by which the page moves it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

_HERE = Path(__file__).parent
#: What follows uses what stands before it: the browser gets one script.
_SCRIPTS = ("step", "view", "shapes", "paint", "lanes", "pointer", "keys", "track")
#: Pixels around the figure: buttons, strip, the chosen op in words, key.
_AROUND = 34 + 26 + 20 + 22
_HTML = """
<div class="track">
  <div class="bar" role="toolbar" aria-label="Ways through the step"></div>
  <div class="over">
    <canvas class="strip" aria-hidden="true"></canvas><div class="window"><div class="brush"></div></div>
  </div>
  <div class="figure" role="application" tabindex="0"><canvas class="lanes" aria-hidden="true"></canvas></div>
  <div class="told" aria-hidden="true"></div><div class="said" aria-live="polite"></div>
  <div class="key"></div><div class="tip" hidden></div>
</div>
"""
_TRACK = st.components.v2.component(
    "ampscope.step_track",
    html=_HTML,
    css=(_HERE / "step_track.css").read_text("utf-8"),
    js="\n".join((_HERE / f"{name}.js").read_text("utf-8") for name in _SCRIPTS),
)
_CURSOR = st.components.v2.component(
    "ampscope.step_cursor", html="<span></span>", js=(_HERE / "cursor.js").read_text("utf-8")
)


@dataclass(frozen=True, slots=True)
class Pick:
    """An op that was chosen on the track."""

    at: int  #: its position
    is_playing: bool  #: on the way to others


def step_track(key: str, drawn: bytes, height: int, on_pick: Callable[[Pick], None], *, name: str, ops: int) -> None:
    """The track; ``on_pick`` is called before the page is drawn again.

    Args:
        key: The element's.
        drawn: As `track_bytes` gives it: the browser is sent the same but once.
        height: Of the figure, pixels.
        on_pick: Gets what was chosen.
        name: Which step is drawn.
        ops: How many it has.
    """

    def picked() -> None:
        state = st.session_state.get(key)
        told: Any = state.get("picked") if state else None
        if not isinstance(told, dict) or told.get("step") != name:
            return
        at = told.get("at")
        if isinstance(at, int) and 0 <= at < ops:
            on_pick(Pick(at, told.get("playing") is True))

    _TRACK(key=key, data=drawn, height=height + _AROUND, on_picked_change=picked)


def step_cursor(name: str, at: int, moves: int, found: bytes | None) -> None:
    """Tell the track where the page's cursor is.

    Args:
        name: The step that it is in.
        at: The position.
        moves: How often the page itself has moved it: the track follows when that is another number.
        found: What a search has found, as `found_bits` gives it; None without a search.
    """
    text = None if found is None else b64encode(found).decode()
    _CURSOR(key="replay-cursor", data={"step": name, "at": at, "moves": moves, "found": text}, height=0)
