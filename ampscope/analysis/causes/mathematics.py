"""Causes that are mathematics: what is not defined, or infinite, in every dtype. Float32 fails there too.

Divisions by zero are among them, rows that a mask empties, and targets without an alignment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import NOTHING_MORE, CauseEntry, Match, Occurrence, OpRule, Reason, Turn
from ampscope.analysis.causes.underflow import Flushed, constant_lost, flushed_operand
from ampscope.analysis.op_facts import LOGARITHMS, Executed, divides_by_given_zeros, numel
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import op_in_words
from ampscope.numerals import number
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

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States what the statistic was taken over."""
        return f"{occurrence.op_in_words} was taken over {self.of}."


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToZero(Reason):
    """A divisor so small that the quotient of an ordinary number leaves the range of its dtype."""

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States what it divided by."""
        return f"{occurrence.op_in_words} divided by a number next to zero, and the quotient leaves its dtype's range."


@dataclass(frozen=True, slots=True, kw_only=True)
class SlopeAtEnd(Reason):
    """The slope of a function that is defined between -1 and 1 is infinite there."""

    of: str

    def explanation(self, _: Occurrence, /) -> str:
        """States whose slope is infinite, and where."""
        return f"The slope of {self.of} is infinite at 1 and at -1, and its operand was there."


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
    """Returns the remedy that bounds the operand of a function away from 1 and -1, where the function ends."""
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
    sentence="{op} divided by zero.",
    remedies=_against_division,
    rules=(
        OpRule(Turn.BACKWARD_DIVISION, _division_in_backward, Phase.BACKWARD),
        OpRule(Turn.OPTIMIZER_DIVISION, _division_in_optimizer, Phase.OPTIMIZER),
        OpRule(Turn.KIND_OF_OP, _too_few_values, by_operands=False),
        OpRule(Turn.DIVISION, _division),
    ),
)


#: Autograd nodes whose derivative is that of a square root.
_SQUARE_ROOTS = ("SqrtBackward", "LinalgVectorNormBackward", "NormBackward", "CdistBackward", "StdBackward")


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeOperand(Reason):
    """An op that is defined for positive numbers was given a negative one."""

    lowest: float


# -- rules and sentences ----------------------------------------------------------------------------------------------


def _logarithm(op: Executed) -> Match | None:
    if op.name not in LOGARITHMS:
        return None
    lowest = op.lowest_operand
    if op.gives_nan and lowest is not None and lowest < 0 and not op.is_complex:
        return Match(Cause.LOG_ZERO, NegativeOperand(lowest=lowest))
    lost = constant_lost(op)
    if lost is not None:
        return lost
    flushed = flushed_operand(op)
    return Match(Cause.LOG_ZERO, flushed) if flushed is not None else Match(Cause.LOG_ZERO)


def _no_logarithm(occurrence: Occurrence) -> str:
    reason, op = occurrence.reason, occurrence.op_in_words
    if isinstance(reason, NegativeOperand):
        return f"{op} was given a negative number ({number(reason.lowest)}), which has no logarithm."
    zero = f"{op} took the logarithm of exactly 0, which is -inf"
    if isinstance(reason, Flushed):
        return f"{zero}: {op_in_words(reason.by)} had rounded a small number to 0 in {reason.dtype}."
    return f"{zero}."


def _negative_root(op: Executed) -> Match | None:
    """A root of a negative number, or a power of one whose exponent is no whole number, be it a constant or a tensor.

    Of real numbers a power is NaN in no other case.
    """
    if op.is_complex:
        return None
    exponent = op.scalars.get("exponent")
    fraction = isinstance(exponent, float) and not exponent.is_integer()
    power = op.name == "pow" and (fraction or (op.gives_nan and all(each.finite for each in op.ranges)))
    base = op.scalars.get("self", op.ranges[0].low if op.ranges else None)
    if (power or op.name in ("sqrt", "rsqrt")) and isinstance(base, (int, float)) and base < 0:
        return Match(Cause.SQRT_NEGATIVE, NegativeOperand(lowest=base))
    return None


def _no_root(occurrence: Occurrence) -> str:
    reason = occurrence.reason
    lowest = f" ({number(reason.lowest)})" if isinstance(reason, NegativeOperand) else ""
    return f"{occurrence.op_in_words} was given a negative number{lowest}."


def _slope_of_root(op: Executed) -> Match | None:
    root = op.name in DIVISIONS and op.site.grad_fn.startswith(_SQUARE_ROOTS)
    return Match(Cause.SQRT_GRAD_ZERO) if root and op.divides_by_zero else None


def _slope_of_power(op: Executed) -> Match | None:
    """Not a power that a function's own backward takes: that is no slope, but a division like any other."""
    slope = op.name == "pow" and op.site.grad_fn.startswith("Pow")
    infinite = slope and op.divides_by_zero and (op.exponent is None or op.exponent < 0)
    return Match(Cause.POW_GRAD_ZERO) if infinite else None


def _masked_row(op: Executed) -> Match | None:
    if "softmax" not in op.name and "scaled_dot_product" not in op.name:
        return None
    masked = any(each.low == -math.inf for each in op.ranges)
    return Match(Cause.ALL_MASKED_SOFTMAX) if masked else None


def _masked_row_by_hand(op: Executed) -> Match | None:
    """A mask's -inf met another one, as in a softmax by hand over a row without a single key left: inf - inf."""
    differs = op.name in ("sub", "add", "rsub") and op.gives_nan
    masked = differs and any(each.low == -math.inf for each in op.ranges)
    return Match(Cause.ALL_MASKED_SOFTMAX) if masked else None


def _empty_row(occurrence: Occurrence) -> str:
    if "softmax" in occurrence.op or "scaled_dot_product" in occurrence.op or not occurrence.op:
        return "A row is masked with -inf from end to end, and the softmax of such a row is 0/0."
    return (
        f"A mask's -inf met another one in {occurrence.op_in_words}, and inf - inf is NaN: so it does in a softmax by "
        "hand over a row that is masked from end to end."
    )


def _ctc(op: Executed) -> Match | None:
    """Matches a CTC loss that is not finite, with a -inf log probability as the reason where there is one.

    With finite log probabilities any alignment has a finite loss; one that is -inf may be on all of them.
    """
    if "ctc_loss" not in op.name:
        return None
    lowest = op.lowest_operand
    return Match(Cause.CTC_INFEASIBLE, NegativeOperand(lowest=lowest) if lowest == -math.inf else NOTHING_MORE)


def _no_alignment(occurrence: Occurrence) -> str:
    if isinstance(occurrence.reason, NegativeOperand):
        return (
            "Log probabilities of -inf were given: each alignment passes through one of them, or the target is longer "
            "than its input allows. So its loss is infinite."
        )
    return "No alignment exists: the target is longer than its input allows, so its loss is infinite."


def _left_out(occurrence: Occurrence) -> str:
    """States that forward leaves the values out, whatever made them."""
    return f"{occurrence.op_in_words} makes non-finite values for elements that forward leaves out after it."


# -- the entries ------------------------------------------------------------------------------------------------------


ENTRIES = (
    CauseEntry(
        cause=Cause.LOG_ZERO,
        noun="a logarithm of zero or less",
        sentence=_no_logarithm,
        remedies=(
            Remedy(
                text="Compute the logarithm from the logits, in one step that cannot reach log(0).",
                code="loss = F.cross_entropy(logits, target)  # or F.log_softmax, F.binary_cross_entropy_with_logits",
                kind=Form.LOG_SOFTMAX,
                untried="a replay tries it where the operand comes from a softmax, a sigmoid or a sum of exponentials",
            ),
            Remedy(
                text="Or keep the operand away from zero with a bound that survives the dtype.",
                code="loss = -torch.log(p.float().clamp_min(1e-7))",
                kind=Form.OPERAND_BOUND,
                untried="a replay bounds what log, log2 and log10 are given, where the code calls them by name",
            ),
        ),
        rules=(OpRule(Turn.KIND_OF_OP, _logarithm),),
    ),
    DIVISION,
    CauseEntry(
        cause=Cause.SQRT_NEGATIVE,
        noun="the square root of a negative number",
        sentence=_no_root,
        remedies=(
            Remedy(
                text="If it is a variance, compute it from centred values: the mean of squares minus the squared mean "
                "can round below zero.",
                code="var = (x - x.mean(-1, keepdim=True)).square().mean(-1)",
                kind=Form.CENTRED,
                untried="a replay tries it where the operand is the mean of squares minus the squared mean",
            ),
            Remedy(
                text="Bound the operand from below by zero.",
                code="y = x.clamp_min(0).add(1e-6).sqrt()",
                kind=Form.OPERAND_BOUND,
                untried="a replay bounds what sqrt, rsqrt and pow are given, where the code calls them by name",
            ),
        ),
        rules=(OpRule(Turn.KIND_OF_OP, _negative_root),),
    ),
    CauseEntry(
        cause=Cause.SQRT_GRAD_ZERO,
        noun="the gradient of a square root at zero",
        sentence="The slope of a square root is infinite at zero, and its operand was exactly zero.",
        remedies=(
            Remedy(
                text="Put a small constant inside the square root.",
                code="d = (x.square().sum(-1) + 1e-6).sqrt()",
                kind=Form.ADDED_EPS,
                untried="a replay adds one to what sqrt is given, where the code calls it by name",
            ),
        ),
        rules=(OpRule(Turn.SLOPE, _slope_of_root, Phase.BACKWARD),),
    ),
    CauseEntry(
        cause=Cause.POW_GRAD_ZERO,
        noun="the gradient of a power at zero",
        sentence="The slope of x**p with p < 1 is infinite at zero, and its base was exactly zero.",
        remedies=(
            Remedy(
                text="Keep the base away from zero: the slope of x**p is infinite there for p < 1.",
                code="y = x.clamp_min(1e-4).pow(p)",
                kind=Form.OPERAND_BOUND,
                untried="a replay adds a constant to the base of a pow that the code calls by name",
            ),
        ),
        rules=(OpRule(Turn.SLOPE, _slope_of_power, Phase.BACKWARD),),
    ),
    CauseEntry(
        cause=Cause.WHERE_GRAD_TRAP,
        noun="the gradient of a value that forward leaves out",
        sentence=_left_out,
        remedies=(
            Remedy(
                text="Make the operand safe before the op, not its result after it: torch.where masks the value, but "
                "the gradient still passes through the op and multiplies 0 by an infinity.",
                code="safe = torch.where(ok, x, torch.ones_like(x))\ny = torch.where(ok, op(safe), 0.0)",
                kind=Form.SAFE_WHERE,
                untried="a replay tries it on divisions and logarithms that torch.where reads at once",
            ),
        ),
        recognised_in="analysis.causes.recognition",
    ),
    CauseEntry(
        cause=Cause.ALL_MASKED_SOFTMAX,
        noun="a softmax over a row that is masked entirely",
        sentence=_empty_row,
        remedies=(
            Remedy(
                text="Keep at least one key in every row, or zero the rows that have none.",
                code="empty = mask.all(-1, keepdim=True)\n"
                "w = logits.masked_fill(mask & ~empty, -torch.inf).softmax(-1)",
                kind=Form.KEPT_ROWS,
                untried="a replay tries it on torch's own softmax and attention, not on a softmax by hand",
            ),
        ),
        rules=(OpRule(Turn.MASKED_ROW, _masked_row), OpRule(Turn.MASKED_ROW, _masked_row_by_hand)),
    ),
    CauseEntry(
        cause=Cause.CTC_INFEASIBLE,
        noun="a CTC target that does not fit its input",
        sentence=_no_alignment,
        remedies=(
            Remedy(
                text="Leave out targets that are longer than their input allows, or set their loss to zero.",
                code="torch.nn.CTCLoss(zero_infinity=True)",
                kind=Form.ZERO_INFINITY,
                untried="a replay tries it on torch's own CTC loss",
            ),
        ),
        rules=(OpRule(Turn.KIND_OF_OP, _ctc),),
    ),
)
