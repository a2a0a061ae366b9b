"""A constant of the code that does not fit its dtype."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes import untried
from ampscope.analysis.causes.cause_entry import CauseEntry, Match, Occurrence, OpRule, Reason, Turn
from ampscope.analysis.origin.op_facts import Executed
from ampscope.analysis.results import Remedy
from ampscope.analysis.words.number_words import number
from ampscope.trace.schema import Form
from ampscope.trace.vocabulary import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal(Reason):
    """A constant of the code does not fit the dtype of its op."""

    value: float
    dtype: str
    refused: bool = False  #: torch raised, rather than make an infinity of it


def _literal(op: Executed) -> Match | None:
    value = op.literal_too_large
    return Match(Cause.LITERAL_OVERFLOW, Literal(value=value, dtype=op.dtype)) if value is not None else None


def _does_not_fit(occurrence: Occurrence) -> str:
    reason = occurrence.reason
    if not isinstance(reason, Literal):
        return "A constant does not fit its dtype."
    refused = f", and {occurrence.op_in_words} refuses it with an error" if reason.refused else ""
    return f"The constant {number(reason.value)} does not fit {reason.dtype}{refused}."


def _lowest_of_dtype(occurrence: Occurrence) -> tuple[Remedy, ...]:
    reason = occurrence.reason
    fits = f"; {number(reason.value)} does not fit {reason.dtype}" if isinstance(reason, Literal) else ""
    end, name = ("largest", "max") if isinstance(reason, Literal) and reason.value > 0 else ("lowest", "min")
    code = f"value = torch.finfo(x.dtype).{name}"
    text = f"Use the {end} value of the dtype in use{fits}."
    return (untried.advice(untried.TURN, text, code, Form.CONSTANT),)


ENTRIES = (
    CauseEntry(
        cause=Cause.LITERAL_OVERFLOW,
        noun="a constant that does not fit the dtype",
        sentence=_does_not_fit,
        remedies=_lowest_of_dtype,
        rules=(OpRule(Turn.LITERAL, _literal, by_operands=False),),
        cured_by_precision=True,
    ),
)
