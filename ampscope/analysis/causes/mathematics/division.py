"""Divisions by zero, by what is next to it, and of what is too little for a mean or a deviation."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import CauseEntry, Match, Occurrence, OpRule, Reason, Turn
from ampscope.analysis.causes.range.underflow import constant_lost, flushed_operand
from ampscope.analysis.origin.given_zeros import divides_by_given_zeros
from ampscope.analysis.origin.op_facts import Executed, numel
from ampscope.analysis.results import Remedy
from ampscope.trace.schema import Form, Phase
from ampscope.trace.vocabulary import Cause

DIVISIONS = frozenset({"div", "true_divide", "floor_divide", "fmod", "remainder", "addcdiv", "reciprocal", "rsqrt"})
_STATISTICS = frozenset({"std", "var", "std_mean", "var_mean", "mean", "native_batch_norm", "_native_batch_norm_legit"})
#: Functions that are defined between -1 and 1, with an infinite slope or value there.
ENDING = ("acos", "asin", "atanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFewValues(Reason):
    """A statistic of nothing, or the deviation of a single value."""

    of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToZero(Reason):
    """A divisor so small that the quotient of an ordinary number leaves the range of its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlopeAtEnd(Reason):
    """The slope of a function that is defined between -1 and 1 is infinite there."""

    of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisorSummed(Reason):
    """A divisor that is a sum of something, as the elements of a mask that take part."""


# -- rules and sentences ----------------------------------------------------------------------------------------------


def _division(op: Executed) -> Match | None:
    divides = op.name in DIVISIONS or (op.name == "pow" and (op.exponent is None or op.exponent < 0))
    if not divides or not (op.divides_by_zero or op.divides_next_to_zero):
        return None
    lost = constant_lost(op)
    if lost is not None or not op.divides_by_zero:
        return lost or Match(Cause.DIV_ZERO, NextToZero())
    flushed = flushed_operand(op)
    if flushed is not None:
        return Match(Cause.FP16_UNDERFLOW, flushed)
    return Match(Cause.DIV_ZERO, DivisorSummed()) if _is_summed(op) else Match(Cause.DIV_ZERO)


def _is_summed(op: Executed) -> bool:
    """Whether what an op divides by is a sum, as it is or in another dtype."""
    made = [edge.from_seq for edge in op.divisors]
    casts = [seq for seq in made if op.graph.site(seq).op == "aten._to_copy.default"]
    made += [edge.from_seq for seq in casts for edge in op.graph.inputs[seq]]
    return any(op.graph.site(seq).op.startswith(("aten.sum.", "aten.count_nonzero.")) for seq in made)


def _division_in_backward(op: Executed) -> Match | None:
    if op.name not in DIVISIONS or not op.divides_by_zero:
        return None
    lost = constant_lost(op)
    if lost is not None:
        return lost
    ending = next((name for name in ENDING if op.site.grad_fn.lower().startswith(f"{name}backward")), None)
    return Match(Cause.DIV_ZERO, SlopeAtEnd(of=ending)) if ending is not None else Match(Cause.DIV_ZERO)


def _division_in_optimizer(op: Executed) -> Match | None:
    """A division by a tensor of nothing but zeros that was computed from nothing else: float32 has them too."""
    return Match(Cause.DIV_ZERO) if op.name in DIVISIONS and divides_by_given_zeros(op) else None


def _too_few_values(op: Executed) -> Match | None:
    """A mean of nothing, a deviation of one value, an averaged loss without a single target."""
    if op.name.startswith("nll_loss"):
        weight = next((row.max for row in op.graph.outputs[op.seq] if row.out == 1), None)
        return Match(Cause.DIV_ZERO, TooFewValues(of="no target at all")) if weight == 0 else None
    shapes, results = op.site.in_shapes[:1], op.site.out_shapes[:1]
    if op.name not in _STATISTICS or not shapes or not results:
        return None
    values = numel(shapes[0]) / max(1, numel(results[0]))
    too_few = values == 0 or (values <= 1 and op.name.startswith(("std", "var")))
    return Match(Cause.DIV_ZERO, TooFewValues(of="too few values")) if too_few else None


def _by_zero(occurrence: Occurrence) -> str:
    if isinstance(occurrence.reason, TooFewValues):
        return f"{occurrence.op_in_words} was taken over {occurrence.reason.of}."
    if isinstance(occurrence.reason, SlopeAtEnd):
        return f"The slope of {occurrence.reason.of} is infinite at 1 and at -1, and its operand was there."
    if isinstance(occurrence.reason, NextToZero):
        return f"{occurrence.op_in_words} divided by a number next to zero, and the quotient leaves its dtype's range."
    return f"{occurrence.op_in_words} divided by zero."


_LEAVE_OUT = Remedy(
    text="Leave out what is empty (a mask without a single element, a batch of one) before the mean.",
    untried="what is empty is decided before the call that failed, and a replay changes only that call",
)
#: Ops that divide by what they are given, with the code that keeps it from zero, and what a replay tries of that.
_RECIPROCALS = {
    "pow": ("y = x.clamp_min(1e-4).pow(p)", "the base of a power is bounded in no replay"),
    "rsqrt": ("y = x.clamp_min(1e-6).rsqrt()", "a replay bounds an operand that holds nothing negative"),
    "reciprocal": ("y = 1 / x.clamp_min(1e-6)", "a replay bounds an operand that holds nothing negative"),
}


def kept_between(function: str) -> Remedy:
    """What keeps the operand of a function from where it ends."""
    return Remedy(
        text=f"Keep the operand of {function} away from 1 and -1, by a bound that its dtype can tell from 1.",
        code=f"y = torch.{function}(x.float().clamp(-1 + 1e-6, 1 - 1e-6))",
        kind=Form.OPERAND_BOUND,
        untried=f"a replay bounds an operand that is beyond 1 by rounding, where the code calls {function}",
    )


def _against_division(occurrence: Occurrence) -> tuple[Remedy, ...]:
    if isinstance(occurrence.reason, TooFewValues):
        return (_LEAVE_OUT,)
    if isinstance(occurrence.reason, SlopeAtEnd):
        return (kept_between(occurrence.reason.of),)
    name = next((name for name in _RECIPROCALS if f".{name}." in f"{occurrence.op}."), "")
    if name:
        code, untried = _RECIPROCALS[name]
        text = f"Keep the operand of {name} away from zero: it divides by it."
        return (Remedy(text=text, code=code, kind=Form.OPERAND_BOUND, untried=untried),)
    bound = Remedy(
        text="Bound the divisor away from zero before dividing.",
        code="y = a / b.clamp_min(1e-6)",
        kind=Form.OPERAND_BOUND,
        untried="a replay bounds a divisor that holds nothing negative, where the code itself divides by it",
    )
    return (bound, _LEAVE_OUT) if isinstance(occurrence.reason, DivisorSummed) else (bound,)


# -- the entry --------------------------------------------------------------------------------------------------------

DIVISION = CauseEntry(
    cause=Cause.DIV_ZERO,
    noun="a division by zero",
    sentence=_by_zero,
    remedies=_against_division,
    rules=(
        OpRule(Turn.BACKWARD_DIVISION, _division_in_backward, Phase.BACKWARD),
        OpRule(Turn.OPTIMIZER_DIVISION, _division_in_optimizer, Phase.OPTIMIZER),
        OpRule(Turn.KIND_OF_OP, _too_few_values, by_operands=False),
        OpRule(Turn.DIVISION, _division),
    ),
)
