"""Causes that are mathematics: what is not defined, or infinite, in every dtype. Float32 fails there too."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import (
    CauseEntry,
    Match,
    Occurrence,
    OpRule,
    Reason,
    Turn,
)
from ampscope.analysis.causes.mathematics.division import DIVISION, DIVISIONS
from ampscope.analysis.causes.range.underflow import Flushed, constant_lost, flushed_operand
from ampscope.analysis.origin.op_facts import LOGARITHMS, Executed
from ampscope.analysis.results import Remedy
from ampscope.analysis.words.number_words import number
from ampscope.analysis.words.wording import op_in_words
from ampscope.trace.schema import Form, Phase
from ampscope.trace.vocabulary import Cause

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
    exponent = op.scalars.get("exponent")
    fraction = op.name == "pow" and isinstance(exponent, float) and not exponent.is_integer()
    lowest = op.lowest_operand
    if op.is_complex:
        return None
    if (fraction or op.name in ("sqrt", "rsqrt")) and lowest is not None and lowest < 0:
        return Match(Cause.SQRT_NEGATIVE, NegativeOperand(lowest=lowest))
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
        noun="a gradient from the branch that torch.where did not choose",
        sentence="{op} makes non-finite values for elements that are masked right after it.",
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
)
