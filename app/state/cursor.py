"""Where in a traced step the reader is, and whether it plays: kept in the session, told to the address at rest."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.replay.seek import advance
from state.address import in_address, tell, told_number
from state.choice import missing

_CURSOR = "_ampscope_cursor"


@dataclass(slots=True)
class Cursor:
    """The place in one recording."""

    place: tuple[str, int, str]  #: run, step and source
    at: int
    stride: float = 1.0  #: ops per beat
    carried: float = 0.0  #: what of an op the beats so far have left over
    playing: bool = False
    written: tuple[str, str] = ("", "")  #: the sequence numbers last told to the address, newest first

    def move(self, position: int) -> None:
        """Go there and stand still."""
        self.at = position
        self.playing = False

    def beat(self, seen: Recording) -> None:
        """One beat of playing: on to the next ops; it stops where something not finite begins, and at the end."""
        whole, self.carried = divmod(self.carried + self.stride, 1.0)
        if whole:
            before = self.at
            self.at = advance(seen, before, int(whole))
            self.playing = before < self.at < len(seen) - 1 and not seen.born[self.at]

    def tell(self, seen: Recording) -> None:
        """Put the op into the address, once playing has come to rest."""
        seq = str(seen.seq[self.at])
        if not self.playing and seq != self.written[0]:
            self.written = (seq, self.written[0])
        if not self.playing:
            tell(op=seq)


def cursor(path: str, seen: Recording, start: int) -> Cursor:
    """The cursor in ``seen``: where a link says, else where it was, else at position ``start``."""
    place = (path, seen.traced.step, seen.traced.source)
    known = st.session_state.get(_CURSOR)
    if not isinstance(known, Cursor) or known.place != place:
        known = st.session_state[_CURSOR] = Cursor(place, start)
    asked = in_address("op")
    if asked is not None and asked not in known.written:  # one of these may still be on its way to the browser
        _follow(known, seen, asked)
    return known


def _follow(known: Cursor, seen: Recording, asked: str) -> None:
    """Go to the op that an address names; say so where there is none."""
    number = told_number("op")
    position = known.at if number is None else seen.position(number)
    if number is None or int(seen.seq[position]) != number:
        missing("Op", f"number {asked}", f"number {int(seen.seq[position]):,}")
    known.move(position)
