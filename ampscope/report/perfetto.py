"""A traced step for Perfetto (ui.perfetto.dev) and chrome://tracing, in the Trace Event Format.

A trace does not know when each op ran, only in which order: an op is one microsecond wide. The
track's name says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.replay.timeline import OpMark, Timeline, timeline
from ampscope.analysis.words import op_in_words

_PROCESS, _OPS, _HEADROOM = 1, 1, "headroom, bits"
#: Colour names of the format, by what is to be seen.
_COLOURS = {OpMark.BAD: "terrible", OpMark.NEAR: "bad", OpMark.INTENDED: "grey"}


def as_perfetto(seen: Recording, *, name: str) -> str:
    """The step as JSON: modules as nested slices, ops in them, arrows from forward to backward, headroom as a counter.

    Args:
        seen: The step.
        name: What the run is called.
    """
    track = timeline(seen)
    title = f"{name}, step {seen.traced.step} ({seen.traced.source}); in order, an op is 1 µs"
    events = [
        _named("process_name", title),
        _named("thread_name", f"rank {seen.traced.rank}"),
        *_modules(track),
        *_ops(seen, track),
        *_arrows(track),
    ]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, allow_nan=False)


def _named(what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": _OPS, "args": {"name": name}}


def _slice(name: str, begin: int, width: int, category: str, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": _PROCESS, "tid": _OPS, "ts": begin, "dur": width, **more}


def _modules(track: Timeline) -> Iterator[dict[str, Any]]:
    """Yields a slice for each module, outer ones first, as the format wants slices that begin together."""
    spans = track.spans
    for first, last, _, module in zip(spans.first, spans.last, spans.depth, spans.module, strict=True):
        yield _slice(track.modules[int(module)], int(first), int(last - first) + 1, "module")


def _ops(seen: Recording, track: Timeline) -> Iterator[dict[str, Any]]:
    for position in range(len(seen)):
        op, name = track.ops[int(track.op[position])]
        site, marks = seen.site_of(position), OpMark(int(track.marks[position]))
        headroom = float(track.headroom[position])
        facts = {
            "op": op,
            "dtype": track.dtypes[int(track.dtype[position])] if track.dtype[position] >= 0 else "",
            "line": f"{site.file}:{site.line} {site.code}" if site.file else "",
            "seq": int(track.seq[position]),
            "finite": OpMark.BAD not in marks and OpMark.INTENDED not in marks,
            **({"headroom_bits": round(headroom, 2)} if math.isfinite(headroom) else {}),
        }
        colour = next((told for mark, told in _COLOURS.items() if mark in marks), None)
        told = f"{op_in_words(op)} {name}".strip()
        yield _slice(told, position, 1, "op", args=facts, **({"cname": colour} if colour else {}))
        if math.isfinite(headroom):
            counted = {_HEADROOM: round(max(headroom, 0.0), 2)}
            yield {"ph": "C", "name": _HEADROOM, "pid": _PROCESS, "ts": position, "args": counted}


def _arrows(track: Timeline) -> Iterator[dict[str, Any]]:
    """Yields arrows from each op of forward to those of backward that belong to it."""
    for position, forward in enumerate(track.forward):
        if forward >= 0:
            both = {"name": "backward of", "cat": "backward", "id": position, "pid": _PROCESS, "tid": _OPS}
            yield {"ph": "s", "ts": int(forward), **both}
            yield {"ph": "f", "bp": "e", "ts": position, **both}
