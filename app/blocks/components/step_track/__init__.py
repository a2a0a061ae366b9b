"""The track of a step, drawn and walked through in the browser, and the cursor by which the page moves it.

Two bytes for the height of the figure, then, deflated, a JSON object behind its length and padded to eight bytes, and
the columns that it lists, each padded likewise. Distances are quarters of a bit.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import streamlit as st

from ampscope.analysis.arrays import FloatArray, IntArray
from ampscope.analysis.replay.timeline import OpMark, Timeline
from ampscope.report.figures.heat_map_figure import PLENTY, headroom_shade
from ampscope.report.palette import dtype_color
from ampscope.report.safe_text import short
from ampscope.trace.dtypes import FINFO
from blocks.components.declared import declared

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
_TRACK = declared(__file__, "step_track", _HTML, _SCRIPTS)
_CURSOR = st.components.v2.component(
    "ampscope.step_cursor", html="<span></span>", js=Path(__file__).with_name("cursor.js").read_text("utf-8")
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


#: Steps that a bit is told in, and what stands for a distance that is not known.
PER_BIT, UNKNOWN = 4, 0xFFFF
#: Pixels: the ruler, a row of modules, the ops, the other step, the dtypes, the magnitudes.
RULER, ROW, OPS, OTHER, DTYPES, VALUES = 30, 16, 28, 14, 13, 56
#: Rows of modules that are drawn; a deeper one would leave no room for the ops.
_DEEPEST = 8
Column = tuple[str, npt.NDArray[np.generic]]


def track_height(drawn: Timeline) -> int:
    """Returns the height of the figure in pixels."""
    return sum(_lanes(drawn).values())


def track_bytes(drawn: Timeline, name: str, label: str) -> bytes:
    """All that the track shows of a step.

    Args:
        drawn: What to show.
        name: Which step it is; the cursor names it too.
        label: A sentence that says what the figure shows, for those who do not see it.
    """
    columns = list(_columns(drawn))
    told = {
        "name": name,
        "label": label,
        "count": len(drawn.seq),
        "columns": [(one, values.dtype.str[1:], len(values)) for one, values in columns],
        "lanes": _lanes(drawn),
        "ops": [_title(op, given) for op, given in drawn.ops],
        "modules": [short(module, 200) for module in drawn.modules],
        "dtypes": [(dtype, dtype_color(dtype), _doublings(dtype)) for dtype in drawn.dtypes],
        "phases": [(one.first, one.last, short(one.name, 20)) for one in drawn.phases],
        "parted": drawn.parted,
        "shades": [headroom_shade(at / PER_BIT) for at in range(PLENTY * PER_BIT + 1)],
        "marksOf": {mark.name: int(mark) for mark in OpMark},
    }
    text = json.dumps(told).encode()
    body = [len(text).to_bytes(8, "little"), _padded(text), *(_padded(values.tobytes()) for _, values in columns)]
    return track_height(drawn).to_bytes(2, "little") + zlib.compress(b"".join(body), 6)


def found_bits(places: IntArray, count: int) -> bytes:
    """Encodes which of ``count`` ops a search has found: a bit for each, deflated."""
    found = np.zeros(count, np.bool_)
    found[places] = True
    return zlib.compress(np.packbits(found, bitorder="little").tobytes(), 6)


def _lanes(drawn: Timeline) -> dict[str, int]:
    """The lanes from top to bottom with their heights."""
    return {
        "ruler": RULER,
        "modules": ROW * min(drawn.depth, _DEEPEST),
        "ops": OPS,
        "other": 0 if drawn.other is None else OTHER,
        "dtypes": DTYPES,
        "values": VALUES,
    }


def _columns(drawn: Timeline) -> Iterator[Column]:
    yield "seq", np.diff(drawn.seq, prepend=0).astype("<u4")
    yield "op", drawn.op.astype("<u4")
    yield "module", (drawn.module + 1).astype("<u4")
    yield "dtype", (drawn.dtype + 1).astype("<u1")
    yield "headroom", _quarters(drawn.headroom)
    yield "spread", _quarters(drawn.spread)
    yield "marks", drawn.marks.astype("<u1")
    yield "back", np.where(drawn.forward < 0, 0, np.arange(len(drawn.forward)) - drawn.forward).astype("<i4")
    if drawn.other is not None:
        yield "other", _quarters(drawn.other)
    kept = drawn.spans.depth < _DEEPEST
    yield "spanFirst", np.diff(drawn.spans.first[kept], prepend=0).astype("<i4")
    yield "spanOps", (drawn.spans.last - drawn.spans.first)[kept].astype("<u4")
    yield "spanDepth", drawn.spans.depth[kept].astype("<u1")
    yield "spanModule", drawn.spans.module[kept].astype("<u4")


def _doublings(dtype: str) -> int:
    """From its smallest number to its largest; 0 where that is not known here."""
    return FINFO[dtype].top - FINFO[dtype].lowest if dtype in FINFO else 0


def _quarters(bits: FloatArray) -> npt.NDArray[np.uint16]:
    """Below 0, where a result would not fit, it is 0: nothing is left."""
    scaled = np.clip(np.round(bits * PER_BIT), 0, UNKNOWN - 1)
    return np.where(np.isnan(bits), UNKNOWN, scaled).astype("<u2")


def _title(op: str, given: str) -> str:
    """``bmm``; of an input or parameter its name."""
    return short(given or op.removeprefix("aten.").removesuffix(".default"), 80)


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 8)
