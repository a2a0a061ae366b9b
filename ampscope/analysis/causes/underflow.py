"""Causes in which a number, or a difference, is too small for its dtype: a value, a gradient, a constant, an update."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis import rounding
from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import (
    CauseEntry,
    LostBefore,
    Match,
    Occurrence,
    OpRule,
    Reason,
    Turn,
    float32_region,
    more_range,
)
from ampscope.analysis.causes.state import StandsStill
from ampscope.analysis.op_facts import Executed, flushed_by, rounded_constant
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import op_in_words
from ampscope.numerals import number
from ampscope.provenance import HowLost
from ampscope.trace.schema import Change, Form, Phase
from ampscope.trace.vocabulary import Cause, Severity

# -- a gradient -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientLost(Reason):
    """Gradients miss what the same step has in float32."""

    how: HowLost
    dtype: str  #: in which it was lost
    parameter: str  #: that lost most
    share: float  #: of the mass of its gradient
    others: int = 0  #: further parameters that lost some

    @property
    def is_flushed(self) -> bool:
        """Whether a result was below float16's smallest number."""
        return self.how is HowLost.FLUSHED and self.dtype == "float16"

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States how the op lost them, and which gradients miss how much."""
        op = occurrence.op_in_words
        if self.is_flushed:
            return f"What {op} gives is below float16's smallest number and becomes 0: {self._lost}."
        if self.how is HowLost.SATURATED:
            return (
                f"In {self.dtype} the result of {op} rounds to the end of its range, where its gradient is zero, while "
                f"float32 still tells it from the end: {self._lost}."
            )
        return (
            f"In {self.dtype} the result of {op} is so small beside its operands that it rounds to zero: {self._lost}."
        )

    @property
    def _lost(self) -> str:
        others = f", and {self.others:,} more parameters lose theirs" if self.others > 1 else ""
        others = ", and another parameter loses its own" if self.others == 1 else others
        if self.share >= 0.995:
            return f"{self.parameter} gets no gradient at all{others}, where float32 has one"
        return f"{self.parameter} loses {self.share:.0%} of its gradient{others}, which float32 keeps"


_WITH_LOGITS = {
    "sigmoid": "loss = F.binary_cross_entropy_with_logits(logits.float(), target)",
    "_softmax": "loss = F.cross_entropy(logits.float(), target)  # or: weights = scores.float().softmax(-1)",
}


def _against_standstill(occurrence: Occurrence) -> tuple[Remedy, ...]:
    name, reason = op_in_words(occurrence.op), occurrence.reason
    if isinstance(reason, StandsStill):
        return (reason.remedy,)
    if isinstance(reason, GradientLost) and reason.how is HowLost.SATURATED:
        code = next((code for op, code in _WITH_LOGITS.items() if op in occurrence.op), "y = part(x.float())")
        text = f"Compute {name} and what follows it in float32, or use a loss that takes logits."
        return (Remedy(text=text, code=code, untried=cause_entry.TURN),)
    if occurrence.explicit_half or occurrence.has_tried(Change.MODULES_FP32):
        return ()
    return (float32_region(occurrence.module),)


# -- a value ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed(LostBefore):
    """A value that an op needs was rounded to zero before."""

    dtype: str
    by: str  #: the op that did

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States which op rounded the value to zero."""
        op, by = occurrence.op_in_words, op_in_words(self.by)
        return f"A value that {op} needs was rounded to zero in {self.dtype} before, by {by}."


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlushed(Reason):
    """The gradient that an op of backward gives is rounded to zero."""

    parameter: str  #: which gets none

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States which op gives zeros, and which parameter gets no gradient."""
        return (
            f"The gradient that {occurrence.op_in_words} gives is below float16's smallest number and becomes 0; "
            f"{self.parameter} gets none at all."
        )


def flushed_operand(op: Executed) -> Flushed | None:
    """Returns the op that rounded to zero the value that ``op`` divides by or takes the logarithm of."""
    by = flushed_by(op)
    return Flushed(dtype=by.dtype, by=by.site.op, lost_by=by.seq) if by is not None else None


def _against_underflow(occurrence: Occurrence) -> tuple[Remedy, ...]:
    if not isinstance(occurrence.reason, (GradientFlushed, GradientLost)):
        text = "Compute the small value and what needs it in float32, where it does not become zero."
        code = "p = x.float().softmax(-1)  # before the product, the exponential or the division that shrinks it"
        if isinstance(occurrence.reason, Flushed) and "prod" in occurrence.reason.by:
            code = "y = x.float().cumprod(-1)  # or, of many factors, its logarithm: x.float().log().cumsum(-1)"
        return cause_entry.advice(cause_entry.TURN, text, code), *more_range(occurrence)
    need = "Scale the loss, or raise the scale that it has: gradients this small need the room that a loss scale makes."
    code = "scaler = torch.amp.GradScaler(init_scale=2.0**16)\nscaler.scale(loss).backward()"
    scale = cause_entry.advice(cause_entry.TURN, need, code, Change.SCALE)
    text = "Leave out the small factor in the loss, and lower the learning rate in its place."
    return scale, cause_entry.advice(cause_entry.MEANING, text), *more_range(occurrence)


# -- a constant -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLost(LostBefore):
    """A constant that was to keep an operand safe was rounded away."""

    value: float
    becomes: float
    dtype: str

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States what the constant becomes in its dtype."""
        return (
            f"The constant {number(self.value)} that should keep the operand of {occurrence.op_in_words} safe becomes "
            f"{number(self.becomes)} in {self.dtype}."
        )


def constant_lost(op: Executed, *, shown: bool = True) -> Match | None:
    """Whether a constant that was to keep the operand from zero did not survive its dtype; who lost it may be shown."""
    lost = rounded_constant(op)
    if lost is None:
        return None
    by = lost.seq if shown else None
    return Match(
        Cause.EPS_UNDERFLOW, ConstantLost(value=lost.value, becomes=lost.becomes, dtype=lost.dtype, lost_by=by)
    )


def _optimizer_eps(op: Executed) -> Match | None:
    """The same of the optimizer's own epsilon, which torch loses."""
    return constant_lost(op, shown=False)


def _constant_that_survives(occurrence: Occurrence) -> tuple[Remedy, ...]:
    reason = occurrence.reason
    dtype = reason.dtype if isinstance(reason, ConstantLost) else "float16"
    if isinstance(reason, ConstantLost) and reason.becomes == 1.0:
        code = f"p = p.clamp(max={1 - rounding.EPSILON.get(dtype, 1e-3)!r})"
        text = f"Use a bound that {dtype} can tell from 1."
    else:
        eps = number(rounding.safe_eps(dtype), 3)
        text, code = f"Use an eps that survives {dtype}: at least {eps}.", f"eps = {eps}"
    first = Remedy(text=text, code=code, kind=Form.CONSTANT, untried=cause_entry.TURN)
    is_left_out = occurrence.explicit_half or occurrence.has_tried(Change.MODULES_FP32)
    return (first,) if is_left_out else (first, float32_region(occurrence.module))


# -- an update --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesLost(Reason):
    """Weights stay where they are, because their dtype rounds the optimizer's update away."""

    dtype: str
    share: float  #: of the weights

    def explanation(self, _: Occurrence, /) -> str:
        """States how many weights the updates do not reach."""
        return (
            f"{self.share:.0%} of the weights did not move in the optimizer's step: their updates are too small for "
            f"{self.dtype}."
        )


def _against_rounding(occurrence: Occurrence) -> tuple[Remedy, ...]:
    text = (
        "Keep the parameters in float32 and let autocast choose bfloat16 op by op; small updates then reach weights "
        "that can hold them."
    )
    code = "model.float()\nwith torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = step(batch)"
    float32 = cause_entry.advice(cause_entry.BEFORE, text, code, Change.FP32)
    if isinstance(occurrence.reason, StandsStill):
        return occurrence.reason.remedy, float32
    master = "Or give the optimizer float32 master weights, or one that rounds stochastically."
    return float32, cause_entry.advice(cause_entry.SCALER, master)


# -- a difference -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesLost(Reason):
    """Values that number something are rounded to each other."""

    before: int  #: different values that were read, of a sample
    after: int  #: that are left
    changed: int  #: elements of the sample that are another number, where these become an index; 0 elsewhere
    of: int  #: elements of the sample
    read: str  #: dtype that was read; empty where they were counted out in half precision
    dtype: str

    def explanation(self, _: Occurrence, /) -> str:
        """States how many values are others, or become the same, and up to where the dtype tells numbers apart."""
        exact = f"{self.dtype} tells all whole numbers apart only up to {rounding.WHOLE[self.dtype]:,}"
        if self.changed:
            return (
                f"{self.changed:,} of {self.of:,} numbers of {self.read} are others in {self.dtype} ({exact}), "
                "and are made whole numbers again: as an index these pick other rows."
            )
        what = f"different values of {self.read}" if self.read else "values of a grid"
        return (
            f"{self.before:,} {what} become {self.after:,} in {self.dtype}: what they number is no longer told apart "
            f"({exact})."
        )


_KEEP_APART = (
    cause_entry.advice(
        cause_entry.MEANING,
        "Keep what numbers something in its own dtype, and cast after the difference is taken or encoded.",
        "with torch.autocast(device_type, enabled=False):\n    encoded = encode(positions.float())",
    ),
)


# -- the entries ------------------------------------------------------------------------------------------------------

ENTRIES = (
    CauseEntry(
        cause=Cause.FP16_UNDERFLOW,
        noun="a value too small for float16",
        sentence="A value that {op} needs was rounded to zero before.",
        remedies=_against_underflow,
        recognised_in="analysis.causes.mathematics",
        cured_by_precision=True,
    ),
    CauseEntry(
        cause=Cause.STAGNATION,
        noun="gradients that half precision loses",
        sentence="Every gradient of the step is zero, while the same step in float32 has gradients; no op shows why.",
        remedies=_against_standstill,
        recognised_in="analysis.diagnosis.silent_failures",
        cured_by_precision=True,
    ),
    CauseEntry(
        cause=Cause.INFORMATION_LOST,
        noun="values that a cast no longer tells apart",
        sentence="Many different values become few in a cast to half precision.",
        remedies=_KEEP_APART,
        severity=Severity.WARNING,
        recognised_in="analysis.diagnosis.silent_failures",
        cured_by_precision=True,
    ),
    CauseEntry(
        cause=Cause.EPS_UNDERFLOW,
        noun="an epsilon that vanished in float16",
        sentence="The constant that should keep the operand of {op} safe is rounded away.",
        remedies=_constant_that_survives,
        rules=(OpRule(Turn.OPTIMIZER_CONSTANT, _optimizer_eps, Phase.OPTIMIZER),),
        cured_by_precision=True,
    ),
    CauseEntry(
        cause=Cause.BF16_PRECISION,
        noun="updates too fine for bfloat16",
        sentence="The updates are too small for bfloat16.",
        remedies=_against_rounding,
        recognised_in="analysis.diagnosis.silent_failures",
    ),
)
