"""Is my loss scale right? The verdict in one sentence, a recommendation with its reason, and what would have been."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ampscope.analysis.results import ScaleHealth, ScaleVerdict
from ampscope.analysis.scale.health import WORTH_A_START
from ampscope.analysis.scale.scale_history import ScaleHistory, scale_history
from ampscope.analysis.scale.scaler_course import ScaleCourse
from ampscope.analysis.scale.what_if import ScalerRules, WhatIf, scale_record, what_if
from ampscope.analysis.scale.window import LEAST_LOOKS, MOSTLY, SAVED, ScaleLoss, ScaleWindow, scale_window
from ampscope.analysis.tables.lazy_tables import first_rank
from ampscope.analysis.words import in_words
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run

#: From this share of gradients below float16's normal numbers on, a larger scale is told of: a tail is no loss.
TAIL = 0.1


class Judgement(StrEnum):
    """Whether a loss scale is right."""

    RIGHT = "right"
    LOW = "low"  #: it serves, and a larger one would keep more of the gradients; `diagnose` warns of nothing
    TOO_SMALL = "too_small"  #: most gradients lie below float16's normal numbers: flushed to zero, or short of bits
    UNWELL = "unwell"  #: its history says so: `ScaleHealth`
    UNSCALED = "unscaled"  #: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Says what to do about a loss scale, and why."""

    text: str
    reason: str
    rules: ScalerRules | None = None  #: the scaler to use; null where it is to be left, or where no scaler helps
    code: str = ""  #: of a change that is none of the scaler's rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAnswer(NotebookRepr):
    """The loss scale as one optimizer of one rank saw it."""

    rank: int = 0
    optimizer: int = 0
    judgement: Judgement = Judgement.UNSCALED
    sentence: str = ""
    recommendation: Recommendation | None = None  #: null without a loss scale
    current: float | None = None
    rules: ScalerRules = field(default_factory=ScalerRules)  #: how the scaler was made
    health: ScaleHealth | None = None
    window: ScaleWindow = field(default_factory=ScaleWindow)
    simulated: WhatIf | None = None  #: null unless asked for


def scale_answer(run: Run, *, optimizer: int | None = None, rank: int | None = None) -> ScaleAnswer:
    """Whether the loss scale of ``optimizer`` on ``rank`` (by default the run's first) is right.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    rank = first_rank(run) if rank is None else rank
    history = scale_history(run, optimizer=optimizer, rank=rank)
    window = scale_window(run, rank, history.optimizer, at=history.current)
    rules = ScalerRules.of(history.settings, history.first)
    judgement = _judged(history, window)
    record = scale_record(run, optimizer=history.optimizer, rank=rank)
    recommended = _recommended(judgement, history, window, record, rules)
    told = sentence(history, window)
    unsaved = what_if(record, rules).unsaved
    if unsaved and judgement != Judgement.UNWELL:
        told = (
            f"{told[:-1]}; {unsaved:,} of {history.skipped:,} skipped steps had a loss that no scale would have saved."
        )
    return ScaleAnswer(
        rank=rank,
        optimizer=history.optimizer,
        judgement=judgement,
        sentence=told,
        recommendation=recommended,
        current=history.current,
        rules=rules,
        health=history.health,
        window=window,
    )


def simulated(answer: ScaleAnswer, run: Run, rules: ScalerRules) -> ScaleAnswer:
    """The answer with what would have been under other rules."""
    record = scale_record(run, optimizer=answer.optimizer, rank=answer.rank)
    return replace(answer, simulated=what_if(record, rules))


def sentence(history: ScaleHistory, window: ScaleWindow) -> str:
    """Whether the loss scale is right, in one sentence.

    Args:
        history: The scaler's history.
        window: The scales at which its gradients fit, with the losses at the current one.
    """
    judgement = _judged(history, window)
    if judgement == Judgement.UNSCALED or history.health is None:
        return "No step of this run used a loss scale."
    if judgement == Judgement.UNWELL or history.current is None:
        return _unwell(history.health, history.current)
    now = _now(history, window)
    if now is None or window.low is None:
        return (
            f"As far as skipped steps tell, {in_words(history.current)} is right; how much of the gradients is flushed "
            "to zero was not measured."
        )
    return _measured(judgement, now, window.low, window.high, window.limited_by)


def _measured(judgement: Judgement, now: ScaleLoss, low: float, high: float | None, limit: str) -> str:
    scale = in_words(now.scale)
    if judgement in (Judgement.TOO_SMALL, Judgement.LOW):
        small = judgement == Judgement.TOO_SMALL
        lead = "No, it is too small" if small else "It serves, and a larger one would keep more"
        return (
            f"{lead}: at {scale}, {_percent(now.lost_share + now.subnormal_share)} of the gradient values that were "
            f"measured lie below float16's normal numbers; from {in_words(low)} on they are kept"
            f"{_too_high(low, high, limit)}."
        )
    told = f"Yes: at {scale}, {_percent(now.lost_share)} of the gradient values that were measured are flushed to zero"
    if low > now.scale:
        told += f" (from {in_words(low)} on they are kept)"
    if high is None:
        return f"{told}."
    if high < now.scale:
        return f"{told}, though {limit} may overflow above {in_words(high)}, and then a step is skipped."
    return f"{told}, and up to {in_words(high)} nothing that was measured overflows."


def _too_high(low: float, high: float | None, limit: str) -> str:
    """Says that above a scale other gradients overflow; empty unless that is below the one at which all are kept."""
    return "" if high is None or high >= low else f", but above {in_words(high)} {limit} overflows"


def _judged(history: ScaleHistory, window: ScaleWindow) -> Judgement:
    if history.health is None or not history.current or not math.isfinite(history.current):
        return Judgement.UNSCALED if history.health is None else Judgement.UNWELL
    if not history.health.verdict.is_calm:
        return Judgement.UNWELL
    now = _now(history, window)
    if now is None or window.low is None or history.current >= window.low:
        return Judgement.RIGHT
    below = now.lost_share + now.subnormal_share
    if below >= MOSTLY and len(window.steps) >= LEAST_LOOKS:
        return Judgement.TOO_SMALL
    return Judgement.LOW if now.lost_share > SAVED or below > TAIL else Judgement.RIGHT


def _now(history: ScaleHistory, window: ScaleWindow) -> ScaleLoss | None:
    """Returns the gradient loss at the scale of the next step."""
    return next((each for each in window.at_scale if each.scale == history.current), None)


def _unwell(health: ScaleHealth, scale: float | None) -> str:
    current = in_words(health.current if scale is None else scale)
    return {
        ScaleVerdict.COLLAPSED: f"It has fallen to {current} and steps are skipped all the same: no scale helps, "
        "for something else is wrong.",
        ScaleVerdict.FLOORED: f"No: it lies at {current}, where it helps nobody.",
        ScaleVerdict.OSCILLATING: f"No: it goes up and down so often that {_percent(health.lost_share)} of all steps "
        "were lost.",
        ScaleVerdict.RUNAWAY: f"It does nothing: at {current}, no gradient of float16 could be finite.",
    }.get(health.verdict, f"No: it is {current}.")


def _percent(part: float) -> str:
    return "none" if part == 0 else "under 0.1 %" if part < 0.001 else f"{100 * part:.1f} %"


def _recommended(
    judgement: Judgement, history: ScaleHistory, window: ScaleWindow, record: ScaleCourse, made: ScalerRules
) -> Recommendation | None:
    health = history.health
    if health is None or judgement == Judgement.UNSCALED:
        return None
    if judgement == Judgement.UNWELL:
        first = next(iter(health.remedies), None)
        text = first.text if first else "Leave the scaler, and look at the steps that were skipped."
        return Recommendation(text=text, reason=health.explanation, code=first.code if first else "")
    if judgement in (Judgement.TOO_SMALL, Judgement.LOW):
        return _larger(window, made)
    return _fewer_skips(health, record, made)


def _larger(window: ScaleWindow, made: ScalerRules) -> Recommendation:
    """A start inside the window, with room for gradients that grow."""
    low, high = window.low or 1.0, window.high
    if high is not None and high < low:
        needy = next((one.parameter for one in window.parameters if one.low is not None), "")
        return Recommendation(
            text="No scale keeps all gradients: let the modules at either end compute in float32.",
            reason=f"That of {needy} needs {in_words(low)}, and from {in_words(2 * high)} on "
            f"{window.limited_by} overflows.",
        )
    start = low if high is None else max(low, high / 4)
    end = "" if high is None else f", and up to {in_words(high)} nothing overflows"
    return Recommendation(
        text=f"Start at {in_words(start)}.",
        reason=f"From {in_words(low)} on, gradients are kept{end}.",
        rules=replace(made, init_scale=start),
    )


def _fewer_skips(health: ScaleHealth, record: ScaleCourse, made: ScalerRules) -> Recommendation:
    """Another start, or rarer growth, where the run's own record says that it would have saved steps."""
    held = health.held or made.init_scale
    rarer = 10 * made.growth_interval
    options = (
        (f"Start at {in_words(held)}.", replace(made, init_scale=held)),
        (
            f"Start at {in_words(held)} and grow after {rarer:,} good steps only.",
            replace(made, init_scale=held, growth_interval=rarer),
        ),
    )
    best, text, rules = health.skipped, "", made
    for said, other in options:
        skipped = what_if(record, other).skipped if other != rules else best
        if best - skipped >= WORTH_A_START:
            best, text, rules = skipped, said, other
    if not text:
        return Recommendation(
            text="Leave the scaler as it is.",
            reason=f"{_steps(health.skipped)} skipped, and neither another start nor rarer growth saves many.",
        )
    reason = f"{_steps(best)} skipped instead of {health.skipped:,}, by the run's own record."
    return Recommendation(text=text, reason=reason, rules=rules)


def _steps(count: int) -> str:
    return {0: "No step was", 1: "One step was"}.get(count, f"{count:,} steps were")
