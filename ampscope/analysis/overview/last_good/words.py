"""The sentences on what has moved since the last good step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ampscope.analysis.overview.last_good.unusual import UNUSUAL
from ampscope.analysis.results import Move
from ampscope.analysis.words.number_words import number
from ampscope.analysis.words.wording import place_in_words
from ampscope.trace.schema import Node

#: Characters that the moves take in a summary, and the moves that it names at most.
_ROOM, _NAMED = 200, 3
#: Characters of a name.
_LONGEST = 48


class Compared(NamedTuple):
    """What recorded steps could be compared in."""

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


def summary(step: int, calm: int, moves: Sequence[Move], compared: Compared | None) -> str:
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
    """What to say where no step went well."""
    if step == 0:
        return "Last good step: none, for this is the first step."
    return f"Last good step: none, for no step before step {step:,} went well."


def _listed(moves: Sequence[Move]) -> str:
    """As many as there is room for, but one."""
    told = [moves[0].text]
    for each in moves[1:_NAMED]:
        if len("; ".join((*told, each.text))) > _ROOM:
            break
        told.append(each.text)
    more = len(moves) - len(told)
    return "; ".join(told) + (f"; and {more:,} more" if more else "")
