"""Says in plain sentences what an incident is and why it happened."""

from __future__ import annotations

from typing import Any

from ampscope.analysis import rounding
from ampscope.analysis.results import Finding, Incident, SourceLine
from ampscope.trace.schema import Trigger
from ampscope.trace.vocabulary import Cause


def explanation(cause: Cause, op: str, facts: dict[str, Any]) -> str:
    """Why the value went wrong, with the numbers that say so."""
    text = _why(cause, op, facts)
    if facts.get("masked"):
        text += (
            " A mask hides that value in forward, but the gradient still passes through the op and turns 0 times an "
            "infinity into NaN."
        )
    return text


def _why(cause: Cause, op: str, facts: dict[str, Any]) -> str:
    name = short_op(op)
    dtype = facts.get("dtype", "float16")
    match cause:
        case Cause.FP16_OVERFLOW:
            limit = rounding.LARGEST["float16"]
            largest = facts.get("largest")
            operands = f" from operands up to {largest:.4g}" if largest is not None else ""
            return f"The result of {name} is too large for float16, which ends at {limit:g}{operands}."
        case Cause.EPS_UNDERFLOW:
            return (
                f"The constant {facts.get('constant')!r} that should keep the operand of {name} safe becomes "
                f"{facts.get('becomes'):g} in {dtype}."
            )
        case Cause.LOG_ZERO:
            return f"{name} was given a zero: the probability had been rounded to exactly 0 (or 1 - p to 0) before."
        case Cause.DIV_ZERO:
            return f"{name} divided by zero." if not facts.get("of") else f"{name} was taken over {facts['of']}."
        case Cause.SQRT_NEGATIVE:
            return f"{name} was given a negative number ({facts.get('lowest', 0):.4g})."
        case Cause.SQRT_GRAD_ZERO:
            return "The slope of a square root is infinite at zero, and its operand was exactly zero."
        case Cause.POW_GRAD_ZERO:
            return "The slope of x**p with p < 1 is infinite at zero, and its base was exactly zero."
        case Cause.ALL_MASKED_SOFTMAX:
            return "A row is masked with -inf from end to end, and the softmax of such a row is 0/0."
        case Cause.LITERAL_OVERFLOW:
            return f"The constant {facts.get('literal')} does not fit {dtype}."
        case Cause.SCALE_OVERFLOW:
            return f"The gradient times the loss scale is too large for {dtype} in {name}, while forward is fine."
        case Cause.BAD_INPUT:
            return f"{facts.get('name') or 'An input'} held non-finite values before the model touched it."
        case Cause.BAD_WEIGHT:
            return f"The parameter {facts.get('name')} held non-finite values before the step."
        case Cause.BAD_BUFFER:
            return f"The buffer {facts.get('name')} held non-finite values before the step."
        case Cause.DIVERGENCE:
            return "The values grow from step to step until they leave the range of the dtype."
        case Cause.HARDWARE_TRANSIENT:
            return "The same calls on the same values came out finite when they were run again."
        case Cause.CTC_INFEASIBLE:
            return "No alignment exists: the target is longer than its input allows, so its loss is infinite."
        case Cause.HALF_PARAMS:
            return f"Parameters and optimizer state are kept in {dtype}, which cannot hold the update's numbers."
        case Cause.BENIGN_INITIAL_CALIBRATION:
            return "The loss scale started high and halved until the gradients fit: this is how GradScaler works."
        case Cause.BENIGN_PERIODIC_GROWTH:
            return "The loss scale had been doubled to probe for room and was halved again: this is how GradScaler works."
        case _:
            return str(facts.get("why") or f"{name} made a non-finite value of finite operands; no rule tells why.")


def summary(primary: Incident | Finding | None, *, steps: int, skipped: int, benign: int) -> str:
    """The one sentence on a run."""
    if primary is None:
        if not steps:
            return "No optimizer step was recorded yet."
        calm = f", {skipped} of them skipped while the loss scale found its place" if skipped and benign else ""
        return f"Nothing is wrong in {steps} steps{calm}."
    if isinstance(primary, Finding):
        return f"Step {primary.step}{_at(primary.source)}: {primary.explanation}"
    where = f"module {primary.module}" if primary.module else "the loss code"
    where = "the optimizer" if primary.phase == "optimizer" else where
    what = short_op(primary.op) if primary.op else "the step"
    effect = _EFFECTS.get(primary.trigger, "went wrong")
    lead = f"Step {primary.step} {effect}: {what} in {where}{_at(primary.source)} is the origin"
    return f"{lead} ({primary.phase}). {primary.explanation}"


_EFFECTS = {
    Trigger.NONFINITE_GRADIENT: "was skipped for non-finite gradients",
    Trigger.NONFINITE_LOSS: "had a non-finite loss",
    Trigger.NONFINITE_WEIGHT: "left non-finite weights",
    Trigger.NONFINITE_BUFFER: "left a non-finite buffer",
    Trigger.ABSORBED_OVERFLOW: "computed with an overflow that nobody noticed",
}


def short_op(op: str) -> str:
    """``bmm`` for ``aten.bmm.default``; ``an input`` for the pseudo-op."""
    return op.removeprefix("aten.").rsplit(".", 1)[0].strip("_") if op.startswith("aten.") else f"an {op}".strip()


def _at(source: SourceLine | None) -> str:
    if source is None:
        return ""
    name = source.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f" at {name}:{source.line}"
