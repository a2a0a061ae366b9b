"""A traced step is walked op by op: its track, the cursor, the op under it, and the same op in another step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import streamlit as st

from ampscope.analysis.arrays import IntArray
from ampscope.analysis.replay.op_detail import OpDetail, op_detail
from ampscope.analysis.replay.recording import NEAR_BITS, Recording
from ampscope.analysis.replay.timeline import OpDifference, OpMark, Timeline, timeline
from ampscope.analysis.results import Operand
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.html.incident_sections import VALUES
from ampscope.report.html.markup import as_html, source_html
from ampscope.report.numbers import UNMEASURED, count
from ampscope.report.palette import dtype_color
from ampscope.report.safe_text import short
from ampscope.trace.schema import Cast
from blocks.choices import not_there, step_words
from blocks.components.step_track import Pick, found_bits, step_cursor, track_bytes, track_height
from blocks.components.step_track import step_track as track
from blocks.figure import figure
from blocks.table import table
from blocks.text import heading, paragraph
from data.run_snapshot import RunSnapshot, cached, identity
from data.step_results import KEPT, lockstep_of, recording_of
from state import get_number, get_param, param_in_address, set_choice

_CURSOR = "_ampscope_cursor"


@dataclass(slots=True)
class Cursor:
    """The position in one recording."""

    recording: tuple[str, int, str]  #: run, step and source
    start: int  #: where the page begins by itself
    position: int
    moves: int = 0  #: how often the page has moved it by itself
    playing: bool = False  #: the track is on its way through the step
    written: tuple[str, str] = ("", "")  #: the sequence numbers last put into the address, newest first

    def move(self, position: int) -> None:
        """Go there and stand still; the track follows."""
        self.position = position
        self.playing = False
        self.moves += 1

    def follow(self, pick: Pick) -> None:
        """Go where the track went."""
        self.position, self.playing = pick.at, pick.is_playing

    def write(self, recording: Recording) -> None:
        """Put the op into the address, once playing has come to rest."""
        seq = str(recording.seq[self.position])
        if not self.playing and seq != self.written[0]:
            self.written = (seq, self.written[0])
        if not self.playing:
            set_choice(is_default=self.position == self.start, op=seq)


def cursor_in(recording: Recording, path: str, start: int) -> Cursor:
    """The cursor in a step of the run in ``path``: where a link says, else where it was, else at ``start``."""
    identity = (path, recording.traced.step, recording.traced.source)
    cursor = st.session_state.get(_CURSOR)
    if not isinstance(cursor, Cursor) or cursor.recording != identity:
        cursor = st.session_state[_CURSOR] = Cursor(identity, start, start)
    asked = param_in_address("op")
    if get_param("op") is None and cursor.written[0]:
        cursor.move(start)  # back took it away
    if asked is not None and asked not in cursor.written:  # one of these may still be on its way to the browser
        _follow_link(cursor, recording, asked)
    return cursor


def _follow_link(cursor: Cursor, recording: Recording, asked: str) -> None:
    """Go to the op that an address names; say so where there is none."""
    number = get_number("op")
    position = cursor.position if number is None else recording.position(number)
    if number is None or int(recording.seq[position]) != number:
        not_there("Op", f"number {asked}", f"number {int(recording.seq[position]):,}")
    cursor.move(position)


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
    told = ((OpMark.BORN, "begin NaN or infinity"), (OpMark.NEAR, "come near their limit"), (OpMark.PARTS, "differ"))
    counts = ((int((found.marks & int(mark)).astype(bool).sum()), words) for mark, words in told)
    seen = ", ".join(f"{count(number)} {words}" for number, words in counts if number)
    begin = f"{step}: {count(len(found.seq), 'op')} in the order in which they ran, by headroom, below their modules"
    return f"{begin}; {seen or 'none of them comes near its limit'}. {_KEYS}"


_CASTS = {
    Cast.AUTOCAST: "converted by autocast",
    Cast.EXPLICIT: "converted by your code",
    Cast.PROMOTION: "converted by torch, where two dtypes met",
}
_COLUMNS = ("", "Tensor", "Type", *VALUES)
#: Cells that say nothing of interest; a column of them is left out.
_NOTHING = {"none", UNMEASURED}


def op_card(detail: OpDetail) -> None:
    """The card of an op."""
    line = detail.line
    kind = "error" if line.is_alarming else "warning" if line.is_near else ""
    rows = "".join(f"<span>{name}</span><div>{body}</div>" for name, body in _facts(detail) if body)
    number = f"op number {line.seq:,}"
    st.html(
        f'<div class="amp-card {kind}"><div class="amp-place">{number}</div>'
        f'<div class="amp-title">{as_html(_title(detail), 160)}</div><div>{_chips(detail)}</div>'
        f'<div class="amp-facts">{rows}</div></div>'
    )


def operand_table(
    reads: Sequence[Operand], writes: Sequence[Operand], label: str = "What the op read and wrote"
) -> None:
    """Shows the tensors that the op read and wrote, in words; columns with nothing to say are left out."""
    rows = [*(_row("read", operand) for operand in reads), *(_row("wrote", operand) for operand in writes)]
    kept = [at for at in range(len(_COLUMNS)) if any(row[at] for row in rows)]
    table(label, [_COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _title(detail: OpDetail) -> str:
    line = detail.line
    return f"{line.op} {line.name}" if line.name and line.name != line.op else line.op


def _chips(detail: OpDetail) -> str:
    line = detail.line
    chips = []
    if line.dtype:
        chips.append(
            f'<span class="amp-chip dtype" style="--dtype:{dtype_color(line.dtype)}">{as_html(line.dtype, 20)}</span>'
        )
    if detail.cast in _CASTS:
        chips.append(f'<span class="amp-chip info">{_CASTS[detail.cast]}</span>')
    if line.is_intended:
        chips.append('<span class="amp-chip info">not finite, as intended</span>')
    elif line.is_born:
        chips.append('<span class="amp-chip error">NaN or infinity begins here</span>')
    elif not line.is_finite:
        chips.append('<span class="amp-chip error">not finite</span>')
    if line.is_near:
        chips.append('<span class="amp-chip warning">near its limit</span>')
    return " ".join(chips)


def _facts(detail: OpDetail) -> list[tuple[str, str]]:
    line = detail.line
    kind = f" ({detail.module_type})" if detail.module_type else ""
    scalars = ", ".join(f"{name}={value}" for name, value in detail.scalars)
    return [
        ("Module", as_html(f"{line.module}{kind}" if line.module else "outside the watched modules", 160)),
        ("Phase", as_html(_phase(detail), 80)),
        ("Line", source_html(detail.source) if detail.source else ""),
        ("Autocast", as_html(f"on, {detail.autocast}" if detail.autocast else "off", 40)),
        ("Arguments", as_html(scalars, 200)),
        ("Headroom", as_html(_headroom(detail), 200)),
    ]


def _phase(detail: OpDetail) -> str:
    batch = f", micro-batch {detail.micro_batch}" if detail.micro_batch else ""
    node = f", in {short(detail.grad_fn, 40)}" if detail.grad_fn else ""
    return f"{detail.line.phase or 'end of the step'}{node}{batch}"


def _headroom(detail: OpDetail) -> str:
    """How far the largest value is from the dtype's limit."""
    left = detail.line.magnitudes.headroom
    if left is None or left > 60 or not detail.line.is_finite:
        return ""
    if left < 1:
        return f"less than a factor of 2 below what {detail.line.dtype} holds"
    close = ": one or two doublings are left" if left <= NEAR_BITS else ""
    return f"a factor of {2**left:,.0f} below what {detail.line.dtype} holds{close}"


def _row(what: str, operand: Operand) -> tuple[str, ...]:
    extent, *counts = (cell(operand) for cell in VALUES.values())
    kind = f"{operand.dtype} {operand.shape or 'scalar'}".strip()
    return (what, short(operand.role, 60), kind, extent, *("" if text in _NOTHING else text for text in counts))


_DIFFERENCES = {
    OpDifference.NONE: "Both gave the same, to the last digit of the bounds.",
    OpDifference.DIGITS: "Both gave values of about the same size.",
    OpDifference.SIZE: "Their largest magnitudes are a factor of 2 or more apart.",
    OpDifference.KIND: "Both gave values that are not finite, and not the same ones.",
    OpDifference.FINITE: "One gave finite values, the other did not.",
    OpDifference.ALONE: "The other step has no such op.",
}


def first_difference(run: RunSnapshot, step: TracedStep, other: TracedStep) -> None:
    """Says in a sentence at which op the two steps part."""
    recording, lockstep = recording_of(run, step), lockstep_of(run, step, other)
    words = f"Against {step_words(other).lower()}: "
    if lockstep.first is None:
        paragraph(words + "every value that both have is the same.")
        return
    site = recording.site_of(lockstep.first)
    where = f" in {site.module}" if site.module else ""
    number = int(recording.seq[lockstep.first])
    sentence = f"{words}the first op whose values differ is number {number:,}, {site.op}{where}."
    if len(lockstep.notable) and int(lockstep.notable[0]) != lockstep.first:
        notable = int(recording.seq[lockstep.notable[0]])
        sentence += f" From number {notable:,} on they differ by more than digits."
    paragraph(sentence)


def counterpart(run: RunSnapshot, step: TracedStep, other: TracedStep, position: int) -> None:
    """The op at ``position`` as it was in the other step."""
    lockstep = lockstep_of(run, step, other)
    partner = int(lockstep.partner[position])
    heading(step_words(other))
    paragraph(_DIFFERENCES[lockstep.of(position)])
    if partner >= 0:
        theirs = op_detail(recording_of(run, other), partner)
        operand_table(theirs.reads, theirs.writes, "The same in the other step")
