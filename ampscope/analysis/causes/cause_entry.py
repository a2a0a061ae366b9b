"""The parts of an entry of the catalogue of causes, and the arguments that its rules, sentences and remedies get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

from ampscope.analysis.op_facts import Executed
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import place_in_words
from ampscope.trace.schema import Change, Phase
from ampscope.trace.vocabulary import Cause, Severity

#: Stands in advice to go back; the files that a run was seen to save are named after it.
CHECKPOINT = "a checkpoint from before it went bad"


@dataclass(frozen=True, slots=True)
class Reason:
    """Holds what was seen when a cause was recognised; a cause that has more to say of it has a subclass."""

    def explanation(self, _: Occurrence, /) -> str:
        """Explains by what was seen why it happened; empty where that says no more than the cause itself."""
        return ""


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
    #: why it happened, in a sentence: a function says all; a text, which may name the op as ``{op}``, is said where the
    #: reason says no more
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
        return occurrence.reason.explanation(occurrence) or self.sentence.format(op=occurrence.op_in_words)

    def advice(self, occurrence: Occurrence) -> tuple[Remedy, ...]:
        """Returns the remedies for the cause, as far as they can be told without trying them."""
        return self.remedies(occurrence) if callable(self.remedies) else self.remedies


#: Advice that replays try: theirs are limited.
TURN = "the replays that such steps get were used up before its turn"
LOOP = "a replay runs the calls of one step, not the loop around them"
MEANING = "it computes something else, where a replay keeps what is computed"
BEFORE = "it comes before the step, and a replay begins with what was there"
BATCH = "it comes before the step, and a replay begins with the batch as it was"
AHEAD = "nothing has failed yet on which a replay could try it"
SCALER = "it works over many steps, and a replay runs one"
OUTSIDE = "no change of the code cures it, and replays try such changes"
RANKS = "a replay runs the step of one rank"
RAISED = "a call that ends with an error is not run again"
COMPILED = "replays run eager code"
CONVERTED = "where the code converts to half precision itself, a replay widens what a call is given, not the call"
ORDER = "a replay takes the loop's own lines as they are"


def advice(why: str, text: str, code: str = "", kind: str = "") -> Remedy:
    """A piece of advice that no replay has tried, for one of these reasons."""
    return Remedy(text=text, code=code, kind=kind, untried=why)


USE_BFLOAT16 = Remedy(
    text="Use bfloat16, whose range is that of float32 (and which needs no GradScaler).",
    code="with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
    kind=Change.BF16,
    untried=TURN,
)


def float32_region(module: str) -> Remedy:
    """Float32 for a module, or for the loss code where it has no name."""
    where = f"module {module}" if module else "this part of the loss"
    return Remedy(
        text=f"Run {where} in float32.",
        code=(
            "with torch.autocast(x.device.type, enabled=False):\n"
            "    y = part(x.float())  # the part that overflows, on float32 operands"
        ),
        kind=Change.MODULES_FP32,
        untried=TURN,
    )


def more_range(occurrence: Occurrence) -> tuple[Remedy, ...]:
    """Float32 for the part that needs it, or bfloat16: as long as neither was tried, and where autocast decides."""
    if occurrence.explicit_half:
        return ()
    region = () if occurrence.has_tried(Change.MODULES_FP32) else (float32_region(occurrence.module),)
    return region if occurrence.has_tried(Change.BF16) else (*region, USE_BFLOAT16)
