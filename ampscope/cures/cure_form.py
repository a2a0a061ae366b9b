"""A cure form as a whole: what gives it, how it is told, its code, and how the user's statement is written with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from ampscope.cures.call_form import CallForm
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.rewriting.found_call import Asked
from ampscope.cures.rewriting.program.earlier_value import WrittenOut
from ampscope.cures.rewriting.source_file import HasPlace
from ampscope.cures.rewriting.statement import Splice, Statement
from ampscope.numerals import in_code, number
from ampscope.trace.schema import Form

#: Gives forms to try on a failed op, the most promising first; nothing where it is not about such a failure.
Rule = Callable[[FailedOp], Iterator[CallForm]]
#: Tells of a call that was given another form.
Text = Callable[[Asked], str]
#: Changes a statement; no splices where the form has no place in it.
Rewriting = Callable[[Statement, Asked], Sequence[Splice]]


class TrialTurn(IntEnum):
    """Kinds of forms follow each other in this order when a failed op is tried, as they do in `catalogue.FORMS`.

    A form whose kind comes before that of the cure has found no place there, so it is not advised any more.
    """

    NONE = -1  #: no form of an op
    AS_MEANT = auto()  #: the same by mathematics, computed another way
    CONSTANT = auto()
    SCALE_FIRST = auto()
    IN_FLOAT32 = auto()
    SAFE = auto()  #: without what has no value, or no slope: all else stays what it is
    BOUNDED = auto()  #: an operand kept from where the op is not defined: it says something else there


@dataclass(frozen=True, slots=True, kw_only=True)
class CureForm:
    """One form of a call, for all parts of AMPscope that have to do with it."""

    form: Form  #: how traces name it
    tried: Text  #: what a replay did, after ``with``
    sentence: Text  #: the advice
    code: Text = lambda _: ""  #: its general form, where the line itself cannot be rewritten
    turn: TrialTurn = TrialTurn.NONE
    rules: tuple[Rule, ...] = ()
    live: tuple[type[CallForm], ...] = ()  #: those of its call forms that can last
    speaks_for: frozenset[Form] = frozenset()  #: other forms that are the same advice
    depends: bool = False  #: where it leaves out a number, `Asked.was`, it changes good values on some steps only
    rewriting: Rewriting | None = None  #: how it is written into a statement; None where it never is
    repeats: bool = False  #: of calls inside each other the inner ones are written first: what is so is left alone
    named: Callable[[Statement, Asked], tuple[tuple[str, ...], Sequence[Splice]]] | None = None  #: with lines before it
    values: Callable[[Statement, HasPlace, Asked], WrittenOut | None] | None = None  #: with names written out first
    elsewhere: Callable[[HasPlace, Asked], str | None] | None = None  #: as a diff of other lines than the call's


def value(asked: Asked) -> str:
    """The number that went in, for people; empty where none did."""
    return number(asked.value) if asked.value is not None else ""


def was(asked: Asked) -> str:
    """The number that stood there, for people."""
    return number(asked.was or 0.0)


def coded(asked: Asked) -> str:
    """`value` as code writes it."""
    return in_code(asked.value) if asked.value is not None else ""


def exactly(given: float | None) -> str:
    """A number as code writes it, with all its digits: a bound next to 1 is not written as 1."""
    return f"{given:.12g}" if given is not None else ""


def operand(asked: Asked) -> str:
    """``operand of log``; of a quotient, ``divisor``."""
    return "divisor" if asked.call in ("div", "true_divide") else f"operand of {asked.call}"
