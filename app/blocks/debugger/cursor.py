"""Keeps the reader's position in a traced step: in the session, and at rest in the address."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from ampscope.analysis.replay.recording import Recording
from blocks.choices.not_there import not_there
from blocks.components.step_track.step_track import Pick
from state.query_params import get_number, get_param, param_in_address, set_choice

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
