"""The parts of an entry of the catalogue of causes, and the arguments that its rules, sentences and remedies get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

from ampscope.analysis.origin.op_facts import Executed
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import place_in_words
from ampscope.trace.schema import Change, Phase
from ampscope.trace.vocabulary import Cause, Severity


@dataclass(frozen=True, slots=True)
class Reason:
    """Holds what was seen when a cause was recognised; a cause that has more to say of it has a subclass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBefore(Reason):
    """Something that an op needs was lost by another op, upstream."""

    lost_by: int | None  #: the op that lost it; None where it is not to be shown


#: Seen was the cause, and nothing more.
NOTHING_MORE = Reason()


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One occurrence of a cause: where it shows, and what was seen of it."""

    op: str = ""  #: the name of the op at the origin, ``aten.bmm.default``
    name: str = ""  #: where that is no op, but where a value enters the step or leaves it: whose
    module: str = ""
    reason: Reason = NOTHING_MORE
    masked: bool = False  #: the value was masked in forward, and only its gradient failed
    explicit_half: bool = False  #: the op would be half precision without autocast too
    tried: frozenset[str] = frozenset()  #: each `Change` that a replay has tried: what it says is better than advice

    @property
    def op_in_words(self) -> str:
        """The op in words."""
        return place_in_words(self.op, self.name)

    def has_tried(self, change: Change) -> bool:
        """Whether a replay has tried a change."""
        return change in self.tried


class Match(NamedTuple):
    """Holds the cause that a rule names for an op, and the reason for it."""

    cause: Cause
    reason: Reason = NOTHING_MORE


class Turn(IntEnum):
    """The order in which the rules are asked about an op; the first that applies names the cause.

    Rules of one turn exclude each other, so their order among themselves does not matter.
    """

    ENTRY = auto()  #: what came into the step non-finite
    SLOPE = auto()  #: backward: a derivative that is infinite at its operand
    BACKWARD_DIVISION = auto()  #: backward: any other division by zero
    SCALED_GRADIENT = auto()  #: backward: a gradient that the loss scale made too large
    OPTIMIZER_CONSTANT = auto()  #: optimizer: an epsilon that its dtype rounded away
    OPTIMIZER_DIVISION = auto()  #: optimizer: a division by what no dtype would have kept from being zero
    OPTIMIZER_DTYPE = auto()  #: optimizer: a state that is half precision
    LITERAL = auto()  #: a finite constant of the code that does not fit the dtype
    INFINITE_CONSTANT = auto()  #: a constant of the code that is infinite on purpose
    MASKED_ROW = auto()  #: a softmax of nothing but -inf
    INFINITE_OPERAND = auto()  #: an infinity that met another one, or a zero
    KIND_OF_OP = auto()  #: what only ops of one kind can do wrong
    DIVISION = auto()  #: a division by zero; after the roots of negative numbers, which are powers too
    DOMAIN = auto()  #: a number outside the range where an op is defined
    OVERFLOW = auto()  #: what is left: a result beyond the range of its dtype


class OpRule(NamedTuple):
    """How a cause is recognised from an op that made a non-finite value of finite operands."""

    turn: Turn
    match: Callable[[Executed], Match | None]
    phase: Phase | None = None  #: the only phase in which the rule is asked; None: in every phase
    by_operands: bool = True  #: it reads what the operands held, and says nothing where one was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseEntry:
    """All that is known of one cause."""

    cause: Cause
    noun: str  #: a noun phrase without article capital or full stop
    #: why it happened, in a sentence; a text may name the op as ``{op}``
    sentence: str | Callable[[Occurrence], str]
    remedies: tuple[Remedy, ...] | Callable[[Occurrence], tuple[Remedy, ...]] = ()
    severity: Severity = Severity.ERROR
    rules: tuple[OpRule, ...] = ()
    recognised_in: str = ""  #: the module or room below ``ampscope`` that names the cause, where no rule does
    #: Whether a larger dtype cures it: True by its nature, None where a replay has to tell; False where a step that is
    #: finite in float32 proves nothing.
    cured_by_precision: bool | None = None

    def explanation(self, occurrence: Occurrence) -> str:
        """Explains why it happened, with the numbers that say so."""
        if callable(self.sentence):
            return self.sentence(occurrence)
        return self.sentence.format(op=occurrence.op_in_words)

    def advice(self, occurrence: Occurrence) -> tuple[Remedy, ...]:
        """Returns the remedies for the cause, as far as they can be told without trying them."""
        return self.remedies(occurrence) if callable(self.remedies) else self.remedies
