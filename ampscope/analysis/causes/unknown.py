"""The entry for failures that no cause explains: it says what can be said of them all the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import CauseEntry, Match, Occurrence, OpRule, Reason, Turn
from ampscope.analysis.causes.mathematics import ENDING, kept_between
from ampscope.analysis.op_facts import Executed, unmeasured
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import op_in_words
from ampscope.trace.dtypes import FINFO, FLOAT8, PARTS
from ampscope.trace.schema import Form
from ampscope.trace.vocabulary import Cause

#: Dtypes whose values a trace has, unless something kept them from being looked at.
_LOOKED_AT = frozenset({*FINFO, *PARTS, *FLOAT8, "bool", "uint8", "int8", "int16", "int32", "int64"})
_DEFINED_ON_PART = frozenset({"acos", "asin", "atanh", "acosh", "erfinv", "lgamma", "digamma"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Reason):
    """Holds, in a sentence, what is known of a failure without a cause."""

    sentence: str
    advice: tuple[Remedy, ...] = ()  #: what helps all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class InfiniteConstant(Observed):
    """An infinity of the code reached the result."""

    value: float | None  #: None where it is no number that the call itself is given


def infinite_constant(op: Executed) -> InfiniteConstant:
    """Returns the reason for an op that writes an infinity which nothing takes away."""
    sign = "-" if (op.infinite_constant or -math.inf) < 0 else ""
    finite = Remedy(
        text="Put a large number there that is finite, or leave what is masked out of what reads all of it, as label "
        "smoothing, a mean or a sum does.",
        code=f"x = x.masked_fill(mask, {sign}1e4)",
        kind=Form.CONSTANT,
        untried=cause_entry.MEANING,
    )
    sentence = "An infinite constant reached the result."
    return InfiniteConstant(sentence=sentence, advice=(finite,), value=op.infinite_constant)


def _unknown(sentence: str, *advice: Remedy) -> Match:
    return Match(Cause.UNKNOWN, Observed(sentence=sentence, advice=advice))


def not_measured(op: Executed) -> Match | None:
    """Returns a match that says of which operand the trace has no values; None where it has all.

    Without them no cause can be told.
    """
    missing = unmeasured(op)
    if missing is None:
        return None
    shape = f" {missing.shape}" if missing.shape else ""
    known = missing.dtype in _LOOKED_AT
    why = "its values could not be looked at as it ran" if known else f"AMPscope does not look into {missing.dtype}"
    return _unknown(
        f"{op_in_words(op.site.op)} made a non-finite value, and why cannot be told: its operand {missing.arg} "
        f"({missing.dtype}{shape}) was not measured, for {why}."
    )


def _infinite_constant(op: Executed) -> Match | None:
    """A constant that is infinite on purpose, as in a mask, and reached what matters or made a NaN at once."""
    if any(str(value) == "nan" for value in op.scalars.values()):
        return _unknown(f"{op.name} was given the constant nan.")
    constant = op.infinite_constant
    if constant is None:
        return None
    made = f"{op.name} was given the constant {constant}"
    if op.gives_nan:
        return _unknown(f"{made}, and 0 times an infinity (or inf - inf) is NaN.")
    return _unknown(f"{made}, and nothing took the infinity away before the result.")


def _infinite_operand(op: Executed) -> Match | None:
    infinite = any(end is not None and math.isinf(end) for each in op.ranges for end in each)
    if not infinite or not op.gives_nan:
        return None
    text = "Put a finite number in place of the infinity before this op reads it: where it was made, or here."
    helps = cause_entry.advice(cause_entry.MEANING, text, "x = x.clamp(-1e4, 1e4)")
    return _unknown(f"{op.name} was given an infinity, and 0 times that (or inf - inf) is NaN.", helps)


def _out_of_domain(op: Executed) -> Match | None:
    if op.name not in _DEFINED_ON_PART:
        return None
    helps = (kept_between(op.name),) if op.name in ENDING else ()
    sentence = f"{op.name} was given a number outside the range where it is defined."
    return Match(Cause.UNKNOWN, Observed(sentence=sentence, advice=helps))


def _what_is_known(occurrence: Occurrence) -> str:
    """States what was observed, for which other causes, known all the same, have sentences of their own."""
    if isinstance(occurrence.reason, Observed):
        return occurrence.reason.sentence
    return f"{occurrence.op_in_words} made a non-finite value of finite operands, and no rule says why."


def _what_helps(occurrence: Occurrence) -> tuple[Remedy, ...]:
    return occurrence.reason.advice if isinstance(occurrence.reason, Observed) else ()


def wider_reduction(*, by_hook: bool) -> Remedy:
    """Returns the remedy for gradients that are finite on their rank, and too large for the dtype of their reduction.

    Args:
        by_hook: A communication hook chose that dtype.
    """
    return Remedy(
        text="Reduce the gradients in a dtype that holds them: float32, or bfloat16, whose range is the same.",
        code="model.register_comm_hook(None, default_hooks.bf16_compress_hook)" if by_hook else "",
        untried=cause_entry.RANKS,
    )


ENTRIES = (
    CauseEntry(
        cause=Cause.UNKNOWN,
        noun="a cause not told yet",
        sentence=_what_is_known,
        remedies=_what_helps,
        rules=(
            OpRule(Turn.INFINITE_CONSTANT, _infinite_constant, by_operands=False),
            OpRule(Turn.INFINITE_OPERAND, _infinite_operand),
            OpRule(Turn.DOMAIN, _out_of_domain),
        ),
        cured_by_precision=False,
    ),
)
