"""What it takes to run one step again: its part of the tape, and the state it began from."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.capture.replay.state_snapshot import StateSnapshot
from ampscope.capture.replay.tape import dependencies
from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import Entry


class TapedStep(NamedTuple):
    """A step that can be run again."""

    tape: Tape
    state: StateSnapshot  #: what forward may change, as it was when the step began
    since: int  #: position on the tape where the step begins; of what lies before, only what it depends on is run
    had_gradients: bool = False  #: gradients were there before its first backward
    scale: float | None = None  #: its loss scale; None without a scaler

    def entries(self) -> list[tuple[int, Entry]]:
        """The entries that make the step, each with its number, in order."""
        numbers = dependencies.needed(self.tape.entries, self.tape.start, self.since)
        return [(number, self.tape[number]) for number in numbers]
