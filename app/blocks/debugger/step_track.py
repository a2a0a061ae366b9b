"""The track of a step: what the browser is sent of it, once, and where the cursor is."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.analysis.numerics.arrays import IntArray
from ampscope.analysis.replay.timeline import Mark, Timeline, timeline
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.numbers import count
from blocks.basics.figure import figure
from blocks.choices.traced_step_box import step_words
from blocks.components.step_track.step_track import step_cursor
from blocks.components.step_track.step_track import step_track as track
from blocks.components.step_track.wire import found_bits, track_bytes, track_height
from blocks.debugger.cursor import Cursor
from data.cache import cached, identity
from data.run_snapshot import RunSnapshot
from data.step_results import KEPT, lockstep_of, recording_of

_KEYS = "Arrow keys choose an op, N and P one where NaN or infinity begins; W and S zoom, A and D move, 0 shows all."


class _Drawn(NamedTuple):
    name: str
    data: bytes
    height: int  #: pixels
    ops: int
    words: str  #: which step it is
    label: str


def step_track(
    run: RunSnapshot, step: TracedStep, other: TracedStep | None, cursor: Cursor, found: IntArray | None
) -> None:
    """The step from its first op to its last, with ``cursor`` and what a search has ``found``."""
    drawn = _drawn(run, step, other)
    with figure("replay-track", drawn.words, drawn.label):
        track("replay-track", drawn.data, drawn.height, cursor.follow, name=drawn.name, ops=drawn.ops)
    bits = None if found is None else found_bits(found, drawn.ops)
    step_cursor(drawn.name, cursor.position, cursor.moves, bits)


@cached(identity, entries=KEPT)
def _drawn(run: RunSnapshot, step: TracedStep, other: TracedStep | None) -> _Drawn:
    """Encodes the step for the browser, once for all moves of the cursor."""
    found = timeline(recording_of(run, step), lockstep_of(run, step, other) if other else None)
    name = f"{run.path} {step.rank} {step.step} {step.source}"
    words = f"{step_words(step)}{f', against {step_words(other).lower()}' if other else ''}"
    label = _label(found, words)
    return _Drawn(name, track_bytes(found, name, label), track_height(found), len(found.seq), words, label)


def _label(found: Timeline, step: str) -> str:
    """The figure in a sentence."""
    told = ((Mark.BORN, "begin NaN or infinity"), (Mark.NEAR, "come near their limit"), (Mark.PARTS, "differ"))
    counts = ((int((found.marks & int(mark)).astype(bool).sum()), words) for mark, words in told)
    seen = ", ".join(f"{count(number)} {words}" for number, words in counts if number)
    begin = f"{step}: {count(len(found.seq), 'op')} in the order in which they ran, by headroom, below their modules"
    return f"{begin}; {seen or 'none of them comes near its limit'}. {_KEYS}"
