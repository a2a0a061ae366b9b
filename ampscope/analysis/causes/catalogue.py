"""The catalogue of causes: the entries of every family, and what the views look up in them."""

from __future__ import annotations

from ampscope.analysis.causes import (
    ahead,
    harmless,
    mathematics,
    outside,
    overflow,
    ranks,
    state,
    underflow,
    unknown,
    usage,
)
from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence, OpRule
from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.words import capitalized
from ampscope.trace.dtypes import FLOAT8
from ampscope.trace.schema import Node
from ampscope.trace.vocabulary import Cause

FAMILIES = (overflow, underflow, ahead, mathematics, outside, state, ranks, usage, harmless, unknown)

#: Every cause with its entry.
CATALOGUE: dict[Cause, CauseEntry] = {entry.cause: entry for family in FAMILIES for entry in family.ENTRIES}

#: Every rule that recognises a cause from an op, in the order in which they are asked.
OP_RULES: tuple[OpRule, ...] = tuple(
    sorted((rule for entry in CATALOGUE.values() for rule in entry.rules), key=lambda rule: rule.turn)
)


def cause_in_words(cause: Cause) -> str:
    """The cause as a noun phrase without article capital or full stop."""
    return CATALOGUE[cause].noun


def item_in_words(item: Incident | Finding) -> str:
    """Its cause as a noun phrase, in the words of what it met.

    One that speaks of float16 names the dtype of 8 bits that a cast went to instead; what a loop carries is no batch.
    """
    if isinstance(item, Incident) and item.cause is Cause.BAD_INPUT and _is_carried(item):
        return cause_in_words(item.cause).replace("a batch", "a carried tensor")
    if isinstance(item, Incident) and item.lasting:
        return "a lasting jump of the gradient norm"
    told = item.outputs if isinstance(item, Incident) and item.cause is Cause.FP16_OVERFLOW else ()
    narrow = next((each.dtype for each in told if each.dtype in FLOAT8), "")
    return cause_in_words(item.cause).replace("float16", narrow or "float16")


def _is_carried(item: Incident) -> bool:
    """Whether it began with what an earlier step left; what the same step has prepared is its batch."""
    carried = bool(item.path) and item.path[0].op == Node.CARRIED
    return carried and (item.written_by is None or item.written_by.step != item.step)


def what_in_words(item: Incident | Finding) -> str:
    """Its cause in words, with the step since which it is so, where that is another."""
    since = item.written_by if isinstance(item, Incident) else None
    return f"{item_in_words(item)}, since step {since.step:,}" if since is not None else item_in_words(item)


def explanation(cause: Cause, occurrence: Occurrence) -> str:
    """Why the value went wrong, with the numbers that say so."""
    text = CATALOGUE[cause].explanation(occurrence)
    text = capitalized(text) if text.startswith(("an ", "a ")) else text
    if not occurrence.masked:
        return text
    return (
        f"{text} The forward pass gets over that value, but the gradient still passes through the op, where 0 times an "
        "infinity is NaN."
    )
