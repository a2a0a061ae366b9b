"""Where in a traced step the reader is, and whether it plays: kept in the session, and at rest in the address."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.replay.seek import Kind, advance, marked
from blocks.choices.not_there import not_there
from state.query_params import get_number, param_in_address, set_params

_CURSOR = "_ampscope_cursor"


@dataclass(slots=True)
class Cursor:
    """The position in one recording."""

    recording: tuple[str, int, str]  #: run, step and source
    position: int
    stride: float = 1.0  #: ops per beat
    remainder: float = 0.0  #: what of an op the beats so far have left over
    playing: bool = False
    written: tuple[str, str] = ("", "")  #: the sequence numbers last put into the address, newest first

    def move(self, position: int) -> None:
        """Go there and stand still."""
        self.position = position
        self.playing = False

    def beat(self, recording: Recording) -> None:
        """One beat of playing: on to the next ops; it stops where something not finite begins, and at the end."""
        whole, self.remainder = divmod(self.remainder + self.stride, 1.0)
        if whole:
            before = self.position
            self.position = advance(recording, before, int(whole))
            stops = self.position in marked(recording, Kind.NONFINITE)
            self.playing = before < self.position < len(recording) - 1 and not stops

    def write(self, recording: Recording) -> None:
        """Put the op into the address, once playing has come to rest."""
        seq = str(recording.seq[self.position])
        if not self.playing and seq != self.written[0]:
            self.written = (seq, self.written[0])
        if not self.playing:
            set_params(op=seq)


def cursor_in(recording: Recording, path: str, start: int) -> Cursor:
    """The cursor in a step of the run in ``path``: where a link says, else where it was, else at ``start``."""
    identity = (path, recording.traced.step, recording.traced.source)
    cursor = st.session_state.get(_CURSOR)
    if not isinstance(cursor, Cursor) or cursor.recording != identity:
        cursor = st.session_state[_CURSOR] = Cursor(identity, start)
    asked = param_in_address("op")
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
