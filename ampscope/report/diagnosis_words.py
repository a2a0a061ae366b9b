"""Diagnoses and comparisons are put into words: numbers of a cause, remedies, and where two runs part."""

from __future__ import annotations

import math
from collections.abc import Callable

from ampscope.analysis.op_facts import divides, not_zero
from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.replay.compare.compare_results import (
    Comparison,
    Difference,
    DifferenceKind,
    Divergence,
    Likeness,
    Side,
    unlike_in_words,
)
from ampscope.analysis.results import Cost, Finding, Incident, MadeCure, Operand, Remedy
from ampscope.analysis.words import in_words, op_in_words, trial_in_words
from ampscope.numerals import number
from ampscope.report import numbers
from ampscope.report.numbers import nonfinite, value
from ampscope.report.safe_text import place
from ampscope.trace.dtypes import FINFO, FLOAT8, PARTS
from ampscope.trace.schema import Change, Trial
from ampscope.trace.vocabulary import Cause


def number_line(item: Incident | Finding) -> str:
    """``70,920 needed, 65,504 available``: each cause has its own line; empty where the evidence holds no number.

    Args:
        item: The incident or finding; of a finding no values are recorded.
    """
    line = _LINES.get(item.cause) if isinstance(item, Incident) else None
    return line(item) if line is not None and isinstance(item, Incident) else ""


def _beyond_the_end(incident: Incident) -> str:
    """Says how large the op's result is in float32, beside the largest number of the dtype that it ran in."""
    dtype = incident.outputs[0].dtype if incident.outputs else ""
    end = _largest(dtype)
    in_float32 = [tried for tried in incident.tried if tried.change == Change.FP32]
    needed = max((abs(bound) for tried in in_float32 for bound in _finite(tried.op_min, tried.op_max)), default=0.0)
    return f"{number(needed)} needed, {_available(end, dtype)}" if end is not None and needed > end else ""


def _scale_that_fits(incident: Incident) -> str:
    fits = [each.scale for each in incident.tried if each.change == Change.SCALE and each.outcome == Trial.FINITE]
    largest = max((scale for scale in fits if scale), default=None)
    return f"{in_words(largest)} is a loss scale that this step fits in" if largest is not None else ""


def _zeros(incident: Incident) -> str:
    """How many of the numbers that must not be zero are: what an op divides by, or takes the logarithm of."""
    if incident.cause is Cause.DIV_ZERO and not divides(incident.op):
        return ""  # of too few values, or none
    for operand in incident.inputs[not_zero(incident.op, len(incident.outputs))]:
        if operand.statistics.zeros and operand.numel:
            zeros = f"{operand.statistics.zeros:,} of {operand.numel:,} values are 0"
            least = FINFO[operand.dtype].smallest_subnormal if operand.dtype in FINFO else None
            return zeros if least is None else f"{zeros}; {operand.dtype} begins at {number(least)}"
    return ""


def _below_zero(incident: Incident) -> str:
    lowest = [low for operand in incident.inputs[:1] for low in _finite(operand.statistics.min) if low < 0]
    return f"{number(lowest[0])} given to {op_in_words(incident.op)}, at least 0 needed" if lowest else ""


def _came_in(incident: Incident) -> str:
    """Says how many values of a tensor were not finite when it came into the step."""
    for operand in (*incident.outputs, *incident.inputs):
        if operand.numel and (bad := _counted(operand)):
            return f"{bad} among {operand.numel:,} values"
    return ""


def _counted(operand: Operand) -> str:
    seen = operand.statistics
    return nonfinite(operand) if any((seen.nan, seen.posinf, seen.neginf)) else ""


def _headroom(incident: Incident) -> str:
    dtype = incident.outputs[0].dtype if incident.outputs else ""
    end, bits = _largest(dtype), incident.headroom_bits
    if end is None or bits is None:
        return ""
    return f"{number(end / 2.0**bits)} reached, {_available(end, dtype)}"


def _available(end: float, dtype: str) -> str:
    return f"{number(end)} available in {dtype}"


def _finite(*bounds: float | None) -> list[float]:
    return [bound for bound in bounds if bound is not None and math.isfinite(bound)]


def _largest(dtype: str) -> float | None:
    dtype = PARTS.get(dtype, dtype)
    return FINFO[dtype].max if dtype in FINFO else FLOAT8.get(dtype)


_LINES: dict[Cause, Callable[[Incident], str]] = {
    **dict.fromkeys((Cause.FP16_OVERFLOW, Cause.DIVERGENCE), _beyond_the_end),
    **dict.fromkeys((Cause.LOG_ZERO, Cause.DIV_ZERO, Cause.SQRT_GRAD_ZERO), _zeros),
    **dict.fromkeys((Cause.NEAR_OVERFLOW, Cause.TREND_OVERFLOW), _headroom),
    **dict.fromkeys((Cause.BAD_INPUT, Cause.BAD_WEIGHT, Cause.BAD_BUFFER, Cause.BAD_OPTIMIZER_STATE), _came_in),
    Cause.SCALE_OVERFLOW: _scale_that_fits,
    Cause.SQRT_NEGATIVE: _below_zero,
}


def remedy_in_words(remedy: Remedy) -> str:
    """Whether a replay tried it and what came out: ``tried on this step: cures it; +0.4% of the step, +3 MiB``."""
    if remedy.verified is None:
        return f"not tried: {remedy.untried}"
    parts = [trial_in_words(remedy.verified, remedy.kind)]
    if remedy.verified and remedy.changes_good_values:
        parts.append("changes values that were good")
    if remedy.verified and remedy.cost is not None:
        parts.append(cost_in_words(remedy.cost))
    return "; ".join(filter(None, parts))


def cost_in_words(cost: Cost) -> str:
    """Says what a change adds to the step; empty where nothing was measured, and no more memory is written."""
    time = (
        "" if cost.time is None else f"+{numbers.share(cost.time)} of the step" if cost.time else "no measurable time"
    )
    memory = f"+{numbers.size(cost.bytes)}" if cost.bytes and cost.bytes > 0 else ""
    return ", ".join(filter(None, (time, memory)))


TITLE = "What was changed in this run"


def cure_in_words(cure: MadeCure) -> str:
    """One change, in a sentence that begins with its step."""
    lasts = f" from {'this' if cure.at_once else 'the next'} step on" if cure.code else ""
    applied = "; the step was made with the gradients of its replay" if cure.applied else ""
    lost = f"; the step itself is lost ({cure.lost})" if cure.lost else ""
    return f"Step {cure.step:,}: {cure.text}{lasts}{applied}{lost}{_end(cure)}."


def _end(cure: MadeCure) -> str:
    if cure.lifted_at is not None:
        return f"; lifted at step {cure.lifted_at:,}" + (f", for {cure.lifted_because}" if cure.lifted_because else "")
    return "; still in force" if cure.code else ""


#: Norms that differ by at most this share are one and the same threshold.
_SAME = 0.02


def clipped_norm(seen: Overview, first: int) -> str:
    """Says that all gradients have one norm, the threshold divided by the loss scale; empty where they have not.

    Args:
        seen: The run's steps.
        first: The step from which on they were clipped so.
    """
    norms = [norm for step, norm in zip(seen.grad_norm.steps, seen.grad_norm.values, strict=True) if step >= first]
    scales = [power for step, power in zip(seen.log2_scale.steps, seen.log2_scale.values, strict=True) if step >= first]
    if not norms or not scales or min(scales) != max(scales) or not 0 < max(norms) <= (1 + _SAME) * min(norms):
        return ""
    scale = 2.0 ** scales[0]
    threshold = float(f"{max(norms) * scale:.3g}")  # as it was written: the norm has been rounded
    return (
        f"Every step had the same gradient norm, {value(max(norms))}, which is {value(threshold)} divided by "
        f"the loss scale of {value(scale)}: what was clipped to the threshold was {value(scale)} times the gradient."
    )


#: From this score on a difference is told for itself, and not as an effect or a circumstance.
MATTERS = 80.0
TITLES = {
    Likeness.IDENTICAL: "Identical",
    Likeness.WITHIN_TOLERANCE: "The same, within tolerance",
    Likeness.DIFFERENT: "Different",
}
#: What differs, by the kind.
KINDS = {
    DifferenceKind.OP: "ops",
    DifferenceKind.MODULE: "modules",
    DifferenceKind.RENAMED: "names",
    DifferenceKind.MICRO_BATCHES: "micro-batches",
    DifferenceKind.RECOMPUTE: "checkpointing",
    DifferenceKind.SCALAR: "arguments",
    DifferenceKind.OPERANDS: "operands",
    DifferenceKind.DTYPE: "dtypes",
    DifferenceKind.CAST: "casts",
    DifferenceKind.SHAPE: "shapes",
    DifferenceKind.LINE: "lines",
    DifferenceKind.WEIGHTS: "weights",
    DifferenceKind.BATCH: "batch",
    DifferenceKind.RANDOM: "random numbers",
    DifferenceKind.SEED: "seed",
    DifferenceKind.SCALE: "loss scale",
    DifferenceKind.LEARNING_RATE: "learning rate",
    DifferenceKind.OPTIMIZER: "optimizer",
    DifferenceKind.VALUE: "values",
    DifferenceKind.NONFINITE: "NaN or inf",
    DifferenceKind.RANGE: "magnitudes",
    DifferenceKind.VERDICT: "verdict",
    DifferenceKind.LOSS: "loss",
    DifferenceKind.GRAD_NORM: "gradient norm",
    DifferenceKind.SKIPS: "skipped steps",
    DifferenceKind.STEPS: "length",
    DifferenceKind.NOT_COMPARED: "not compared",
    DifferenceKind.ENVIRONMENT: "environment",
}


def side_words(side: Side) -> str:
    """A run, with its model, and which of its steps and ranks is meant."""
    step = f", step {side.step:,}" if side.step is not None else f", {numbers.count(side.steps, 'step')}"
    rank = f", rank {side.rank}" if side.rank else ""
    verdict = f"; {side.verdict.replace('_', ' ')}" if side.verdict else ""
    model = f" ({side.model} on {side.device or 'an unknown device'})" if side.model else ""
    return f"{side.path}{model}{step}{rank}{verdict}"


def where_words(found: Divergence) -> str:
    """The op with which the numbers part, and its step."""
    where = f"{found.op} in {found.module}" if found.module else f"{found.op}, outside the modules"
    step = f"step {found.step:,}" + (f" of A and {found.other_step:,} of B" if found.other_step != found.step else "")
    return f"{where}, {step}"


def apart_words(found: Divergence) -> str:
    """How far the numbers are apart against what is allowed for; empty where that is no matter of more or less."""
    if found.error is None:
        return ""
    if math.isinf(found.error):
        return unlike_in_words(found) or "not finite in one of them"
    apart = f"{numbers.value(found.error)} of the largest magnitude apart"
    return f"{apart}; rounding allows for {numbers.value(found.tolerance)}"


def places_words(found: Difference) -> str:
    """The lines of code in both, where they are known."""
    return " / ".join(filter(None, (place(found.source), place(found.other_source))))


def extent_words(found: Comparison) -> str:
    """How much was compared, and against which tolerance."""
    if not found.traced:
        return "The curves alone: the two have no traced step in common."
    steps = numbers.count(found.traced, "step")
    allowed = "what rounding in their dtypes allows for"
    if found.tolerance is not None:
        allowed = f"{numbers.value(found.tolerance)} of the largest magnitude"
    told = f"{steps} that both traced; of {numbers.count(found.compared)} the ops were compared one by one"
    if found.a.step is not None or found.b.step is not None:
        told = "These two steps, op by op"
    return f"{told}. Results may be apart by {allowed}."
