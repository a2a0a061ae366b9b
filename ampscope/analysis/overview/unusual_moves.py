"""How unusual a move is against how the same quantity moved before, and the sentence on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ampscope.analysis.arrays import FloatArray, IntArray
from ampscope.analysis.results import Move
from ampscope.analysis.words import place_in_words
from ampscope.numerals import number
from ampscope.trace.schema import Node

#: The score of what moves for the first time, and the highest of all else.
FIRST, MOST = 1000.0, 999.0
#: From this many times the usual move on, one is unusual.
UNUSUAL = 4.0
#: Of a quantity that was seen in fewer good steps nobody knows what is usual.
LEAST_SEEN = 3
#: Moves, in bits, below which none is usual: noise of a value that hardly moves.
FLOOR = 0.05
#: A quantity has a trend if this share of its moves go the same way.
SAME_WAY = 0.75


class Unusual(NamedTuple):
    """How unusual a move is."""

    score: float | None  #: `times`, less where chance has a part; `FIRST` of what had not moved; None: not known
    seen: int  #: values that tell what is usual
    times: float = 0.0  #: how many usual moves it is

    @property
    def is_unusual(self) -> bool:
        """Whether it stands out."""
        return self.score is not None and self.score >= UNUSUAL

    def among(self, count: int) -> Unusual:
        """The same of one of many quantities, some of which always move far by chance."""
        if self.score is None or self.score >= FIRST:
            return self
        return self._replace(score=self.score / max(1.0, math.log2(max(1, count)) / 2))

    def in_words(self, what: str) -> str:
        """The same as a phrase.

        Args:
            what: What the values are of: ``good steps``, ``recorded steps``.
        """
        if self.score is None:
            earlier = "one earlier step" if self.seen == 1 else f"{self.seen} earlier steps"
            return f"with {earlier} to compare with" if self.seen else "not seen before"
        if self.score >= FIRST:
            return f"the same in {self.seen:,} {what} before"
        if self.is_unusual:
            return f"{self.times:,.0f} times its usual move"
        return "as in the steps before"


def how_unusual(steps: IntArray, values: FloatArray, move: float, until: int, *, floor: float = FLOOR) -> Unusual:
    """How unusual a move is, by the median of those before; one that goes on as it went is not.

    Args:
        steps: Good steps in which the quantity was seen, in order.
        values: What it was, on the scale on which it moves.
        move: By how much it is otherwise than in the last of them.
        until: The step in which it is.
        floor: The least that counts as a usual move.
    """
    if values.size < LEAST_SEEN:
        return Unusual(None, int(values.size))
    moves = np.diff(values)
    moved = np.abs(moves[moves != 0])
    if not moved.size:
        return Unusual(FIRST, int(values.size))
    usual = float(np.median(np.abs(moves))) or float(np.median(moved))
    expected = max(usual, _trend(steps, moves) * max(0, until - int(steps[-1])), floor)
    times = min(MOST, abs(move) / expected)
    return Unusual(times, int(values.size), times)


def never_moved(seen: int) -> Unusual:
    """Rates the change of something that was always the same and is no number: a dtype, a shape."""
    return Unusual(FIRST if seen >= LEAST_SEEN else None, seen)


def _trend(steps: IntArray, moves: FloatArray) -> float:
    """By how much a quantity moves a step that goes the same way for long; 0 for others."""
    same = max(int((moves > 0).sum()), int((moves < 0).sum()))
    if same < SAME_WAY * moves.size:
        return 0.0
    return float(abs(np.median(moves / np.maximum(1, np.diff(steps)))))


#: Characters that the moves take in a summary, and the moves that it names at most.
_ROOM, _NAMED = 200, 3
#: Characters of a name.
_LONGEST = 48


class Comparability(NamedTuple):
    """Describes how far the recorded steps could be compared."""

    values: int  #: that are finite in both
    moved: bool  #: whether any of them is another
    broken: bool  #: whether anything is not finite that was


def gone(name: str, before: float, after: float) -> str:
    """``the loss went from 2 to 31``."""
    return f"{name} went from {number(before)} to {number(after)}"


def what(op: str, name: str, module: str) -> str:
    """``mm in blocks.3``, ``input x``, ``the gradient of fc.weight``; long names without their middle."""
    where = f" in {_brief(module)}" if module and op not in frozenset(Node) else ""
    return f"{place_in_words(op, _brief(name))}{where}"


def _brief(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[:16]}...{name[-24:]}"


def summary(step: int, calm: int, moves: Sequence[Move], compared: Comparability | None) -> str:
    """When it was last good, and what has moved since, in one or two sentences.

    Args:
        step: The last good step.
        calm: The last that was calm.
        moves: What has moved, the most unusual first.
        compared: What of ops could be compared; None where no ops of both could.
    """
    known = [each for each in moves if each.score is None or each.score >= UNUSUAL]
    lead = f"Last good step: {step:,}"
    since = "Since then"
    if calm != step:
        lead += f", but loss or gradient norm stood out after step {calm:,}"
        since = "Since that one"
    if known:
        return f"{lead}. {since}: {_listed(known)}."
    nothing = "nothing that stayed finite" if compared is not None and compared.broken else "nothing"
    if moves:
        return f"{lead}. {since} {nothing} moved otherwise than in the steps before."
    if compared is None:
        return f"{lead}. {since} nothing of what the steps record moved; no ops of both can be compared."
    if not compared.values:
        return f"{lead}. {since} nothing of what the steps record moved; no values of ops are finite in both."
    return f"{lead}. {since} {nothing} moved{' by a factor of two' if compared.moved else ''}."


def none_good(step: int) -> str:
    """States that no step went well before one."""
    if step == 0:
        return "Last good step: none, for this is the first step."
    return f"Last good step: none, for no step before step {step:,} went well."


def _listed(moves: Sequence[Move]) -> str:
    """Lists as many moves as there is room for, at least the first, and counts the rest."""
    told = [moves[0].text]
    for each in moves[1:_NAMED]:
        if len("; ".join((*told, each.text))) > _ROOM:
            break
        told.append(each.text)
    more = len(moves) - len(told)
    return "; ".join(told) + (f"; and {more:,} more" if more else "")
