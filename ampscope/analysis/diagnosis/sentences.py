"""Says in plain sentences what an incident is and why it happened."""

from __future__ import annotations

from string import Formatter
from typing import Any

from ampscope.analysis.cures import own_half, trials
from ampscope.analysis.cures.own_half import OwnHalf
from ampscope.analysis.results import Finding, Incident, SourceLine
from ampscope.analysis.words.wording import short_op, steps_in_words
from ampscope.trace.schema import Trigger
from ampscope.trace.vocabulary import Cause


def explanation(cause: Cause, op: str, facts: dict[str, Any]) -> str:
    """Why the value went wrong, with the numbers that say so."""
    text = _why(cause, op, facts)
    if facts.get("masked"):
        text += (
            " The forward pass gets over that value, but the gradient still passes through the op, where 0 times an "
            "infinity is NaN."
        )
    own = facts.get("own")
    return text + (own_half.in_words(own) if isinstance(own, OwnHalf) else "")


def _why(cause: Cause, op: str, facts: dict[str, Any]) -> str:
    known = {"op": short_op(op), "dtype": "float16", **{key: _shown(value) for key, value in facts.items()}}
    template = next((text for text in _REASONS.get(cause, ()) if _needs(text) <= known.keys()), None)
    text = template.format_map(known) if template else str(facts.get("why") or _NO_RULE.format_map(known))
    return text[:1].upper() + text[1:] if text.startswith(("an ", "a ")) else text


def _needs(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def _shown(value: Any) -> Any:
    if isinstance(value, float):
        short = f"{value:.4g}"
        return repr(value) if float(short) == 1.0 != value else short
    return short_op(value) if isinstance(value, str) and value.startswith("aten.") else value


_NO_RULE = "{op} made a non-finite value of finite operands, and no rule says why."

#: Per cause, the sentences from the one that needs most facts to the one that needs least.
_REASONS: dict[Cause, tuple[str, ...]] = {
    Cause.FP16_OVERFLOW: (
        "The result of {op} is too large for float16, which ends at 65504; its operands went up to {largest}.",
        "The result of {op} is too large for float16, which ends at 65504.",
    ),
    Cause.FP16_UNDERFLOW: (
        "The gradient that {op} gives is below float16's smallest number and becomes 0; {parameter} gets none at all.",
        "A value that {op} needs was rounded to zero in {dtype} before, by {by}.",
    ),
    Cause.EPS_UNDERFLOW: (
        "The constant {constant} that should keep the operand of {op} safe becomes {becomes} in {dtype}.",
    ),
    Cause.LOG_ZERO: (
        "{op} was given a negative number ({lowest}), which has no logarithm.",
        "{op} took the logarithm of exactly 0, which is -inf: {by} had rounded a small number to 0 in {dtype}.",
        "{op} took the logarithm of exactly 0, which is -inf.",
    ),
    Cause.DIV_ZERO: ("{op} was taken over {of}.", "{op} divided by zero."),
    Cause.SQRT_NEGATIVE: ("{op} was given a negative number ({lowest}).",),
    Cause.SQRT_GRAD_ZERO: ("The slope of a square root is infinite at zero, and its operand was exactly zero.",),
    Cause.POW_GRAD_ZERO: ("The slope of x**p with p < 1 is infinite at zero, and its base was exactly zero.",),
    Cause.WHERE_GRAD_TRAP: ("{op} makes non-finite values for elements that are masked right after it.",),
    Cause.ALL_MASKED_SOFTMAX: ("A row is masked with -inf from end to end, and the softmax of such a row is 0/0.",),
    Cause.LITERAL_OVERFLOW: ("The constant {literal} does not fit {dtype}.",),
    Cause.SCALE_OVERFLOW: (
        "The gradient times the loss scale is too large for {dtype} in {op}, while the forward pass is fine.",
    ),
    Cause.BAD_INPUT: (
        "{name} held non-finite values before the model touched it, at index {rows} of its first dimension.",
        "{name} held non-finite values before the model touched it.",
    ),
    Cause.BAD_WEIGHT: ("The parameter {name} held non-finite values before the step.",),
    Cause.BAD_BUFFER: ("The buffer {name} held non-finite values before the step.",),
    Cause.DIVERGENCE: ("The values have grown until they no longer fit their dtype.",),
    Cause.HARDWARE_TRANSIENT: (
        "What {op} wrote was finite, yet {seen_in} read a non-finite value there: something outside torch changed it.",
        "The same calls on the same values came out finite when they were run again.",
    ),
    Cause.CTC_INFEASIBLE: (
        "No alignment exists: the target is longer than its input allows, so its loss is infinite.",
    ),
    Cause.BF16_PRECISION: (
        "{share} of the weights did not move in the optimizer's step: their updates are too small for {dtype}.",
    ),
    Cause.HALF_PARAMS: (
        "{share} of the weights did not move in the optimizer's step: their updates are too small for {dtype}.",
        "Parameters and optimizer state are kept in {dtype}, which cannot hold the update's numbers.",
    ),
    Cause.BENIGN_INF_MASK: (
        "{op} writes infinities on purpose, as masks do, and they are gone again before loss, gradients and buffers.",
    ),
    Cause.BENIGN_MASKED_INTERNAL: (
        "{op} makes a non-finite value that is masked or replaced before it reaches loss, gradients or buffers.",
    ),
    Cause.BENIGN_METRIC_NAN: (
        "{op} makes a non-finite value that no loss, gradient, weight or buffer depends on, as in a metric or a log.",
    ),
    Cause.BENIGN_INITIAL_CALIBRATION: (
        "The loss scale started high and halved until the gradients fit: this is how GradScaler works.",
    ),
    Cause.BENIGN_PERIODIC_GROWTH: (
        "The loss scale had grown to probe for room and was halved again: this is how GradScaler works.",
    ),
    Cause.BENIGN_SCALE_ADJUSTMENT: (
        "Gradients outgrew the loss scale; it was lowered and training went on: this is how GradScaler works.",
    ),
}


def summary(primary: Incident | Finding | None, *, steps: int, skipped: int, benign: int) -> str:
    """The one sentence on a run."""
    if primary is None:
        if not steps:
            return "No optimizer step was recorded yet."
        calm = f", {skipped:,} of them skipped while the loss scale found its place" if skipped and benign else ""
        return f"Nothing is wrong in {steps:,} steps{calm}."
    if isinstance(primary, Finding):
        when = steps_in_words(primary)
        where = f",{_at(primary.source)}" if primary.source else ""
        return f"{when[:1].upper()}{when[1:]}{where}: {primary.explanation}"
    effect = _EFFECTS.get(primary.trigger, "went wrong")
    if not primary.op:
        return f"Step {primary.step} {effect}. {primary.explanation}"
    outside = "the model itself" if primary.module_type else "the loss code"
    where = f"module {primary.module}" if primary.module else outside
    where = "the optimizer" if primary.phase == "optimizer" else where
    lead = f"Step {primary.step} {effect}: {short_op(primary.op)} in {where}{_at(primary.source)} is the origin"
    return f"{lead} ({primary.phase}). {primary.explanation} {trials.in_words(primary)}".rstrip()


_EFFECTS: dict[str, str] = {
    Trigger.NONFINITE_GRADIENT: "had non-finite gradients",
    Trigger.NONFINITE_LOSS: "had a non-finite loss",
    Trigger.NONFINITE_WEIGHT: "left non-finite weights",
    Trigger.NONFINITE_BUFFER: "left a non-finite buffer",
    Trigger.ABSORBED_OVERFLOW: "computed with an overflow that nobody noticed",
}


def _at(source: SourceLine | None) -> str:
    if source is None:
        return ""
    name = source.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f" at {name}:{source.line}"
