"""A comparison in words: the two sides, where they part and how far, and what kind a difference is of."""

from __future__ import annotations

import math

from ampscope.analysis.replay.compare.results import (
    Comparison,
    Difference,
    Divergence,
    Kind,
    Likeness,
    Side,
    unlike_in_words,
)
from ampscope.report import numbers
from ampscope.report.safe_text import place

#: From this score on a difference is told for itself, and not as an effect or a circumstance.
MATTERS = 80.0
TITLES = {
    Likeness.IDENTICAL: "Identical",
    Likeness.WITHIN_TOLERANCE: "The same, within tolerance",
    Likeness.DIFFERENT: "Different",
}
#: What differs, by the kind.
KINDS = {
    Kind.OP: "ops",
    Kind.MODULE: "modules",
    Kind.RENAMED: "names",
    Kind.MICRO_BATCHES: "micro-batches",
    Kind.RECOMPUTE: "checkpointing",
    Kind.SCALAR: "arguments",
    Kind.OPERANDS: "operands",
    Kind.DTYPE: "dtypes",
    Kind.CAST: "casts",
    Kind.SHAPE: "shapes",
    Kind.LINE: "lines",
    Kind.WEIGHTS: "weights",
    Kind.BATCH: "batch",
    Kind.RANDOM: "random numbers",
    Kind.SEED: "seed",
    Kind.SCALE: "loss scale",
    Kind.LEARNING_RATE: "learning rate",
    Kind.OPTIMIZER: "optimizer",
    Kind.VALUE: "values",
    Kind.NONFINITE: "NaN or inf",
    Kind.RANGE: "magnitudes",
    Kind.VERDICT: "verdict",
    Kind.LOSS: "loss",
    Kind.GRAD_NORM: "gradient norm",
    Kind.SKIPS: "skipped steps",
    Kind.STEPS: "length",
    Kind.NOT_COMPARED: "not compared",
    Kind.ENVIRONMENT: "environment",
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
