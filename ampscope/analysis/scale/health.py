"""Is the loss scale well? Tells collapse, a floor, oscillation and runaway growth from how a ``GradScaler`` works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.arrays import BoolArray
from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.overflow import SMALLER_LOSS
from ampscope.analysis.results import Remedy, ScaleHealth, ScaleVerdict
from ampscope.analysis.scale.scaler_course import (
    CALIBRATION_STEPS,
    LONGEST_CALIBRATION,
    LOWEST_USEFUL_SCALE,
    ScaleCourse,
    scaler_settings,
)
from ampscope.analysis.tables.step_history import History
from ampscope.analysis.words import in_words, times
from ampscope.trace.read.run import Run
from ampscope.trace.vocabulary import Severity

#: What to do about a scale that such skips have brought down.
CURE = (
    Remedy(
        text="Cure the steps whose loss is not finite first; once they are gone, the scale grows again by itself.",
        untried=cause_entry.SCALER,
    ),
)


def prevail(course: ScaleCourse, among: BoolArray) -> bool:
    """Whether they are most of the skips among the attempts that ``among`` marks."""
    return 2 * int((course.hopeless & among).sum()) > int((course.skipped & among).sum())


def hopeless_in_words(course: ScaleCourse, among: BoolArray, where: str = "") -> str:
    """A sentence on those among the marked attempts, with a space before it; empty where there are none."""
    count, skips = int((course.hopeless & among).sum()), int((course.skipped & among).sum())
    if not count:
        return ""
    which = f"all {skips:,}" if count == skips else f"{count:,} of the {skips:,}"
    steps = " ".join(filter(None, (f"{which} steps skipped" if skips > 1 else "the step skipped", where)))
    return f" In {steps} the loss itself was NaN or infinite, which no scale would have saved."


def cure(course: ScaleCourse, among: BoolArray) -> tuple[Remedy, ...]:
    """Returns the remedies for non-finite losses where these prevail among the skips; none elsewhere."""
    return CURE if prevail(course, among) else ()


#: Share of attempts after calibration that probing may lose; 1 in 2,000 at ``GradScaler``'s default interval.
PROBING_SHARE = 0.1
#: Rows of skips below which ups and downs are no pattern.
FEWEST_SWINGS = 5
#: From this share on, losing steps is no longer a matter of taste.
HEAVY_SHARE = 0.4
#: At this scale a gradient has to be below 2**-16 to fit float16: none of a network that learns.
RUNAWAY_SCALE = 2.0**32
#: Skipped attempts in a row during which a scale must not stand still.
STANDSTILL = 3
#: Steps lost in calibration from which on another start is worth a word.
WORTH_A_START = 3
#: ``GradScaler``'s own interval, as advice.
DEFAULT_INTERVAL = 2000


def scale_health(course: ScaleCourse, optimizer: int = 0) -> ScaleHealth | None:
    """The verdict on one optimizer's loss scale; None where no attempt had one.

    Args:
        course: What happened.
        optimizer: The optimizer's number.
    """
    if not course.step.size:
        return None
    judges = (_collapsed, _floored, _oscillating, _runaway)
    found = next((found for found in (judge(course) for judge in judges) if found is not None), None)
    return _health(course, optimizer, found or _calm(course))


def healths(run: Run, rank: int, history: Mapping[int, History]) -> tuple[ScaleHealth, ...]:
    """The verdicts on the loss scales of a run, one for each optimizer that had one.

    Args:
        run: The run.
        rank: One of its ranks.
        history: The steps of that rank, by optimizer.
    """
    found = []
    for number, each in history.items():
        known = ~np.isnan(each.scale)
        parts = (each.step[known], each.scale[known], each.skipped[known], each.bad_loss[known])
        found.append(scale_health(ScaleCourse(*parts, scaler_settings(run, number, rank)), number))
    return tuple(health for health in found if health is not None)


@dataclass(frozen=True)
class _Found:
    verdict: ScaleVerdict
    severity: Severity
    first: int  #: position
    explanation: str
    remedies: tuple[Remedy, ...] = ()


def _collapsed(course: ScaleCourse) -> _Found | None:
    """The newest attempts are a row of skips that is no calibration any more."""
    starts, ends = course.rows
    if not ends.size or ends[-1] != course.skipped.size:
        return None
    first, last = int(starts[-1]), course.skipped.size - 1
    count = last - first + 1
    lowest = float(course.scale[last])
    if count <= LONGEST_CALIBRATION and lowest >= LOWEST_USEFUL_SCALE:
        return None
    if _stands_still(course, first):
        return None
    if count <= LONGEST_CALIBRATION:  # it fell in several rows, without a growth in between
        fallen = int(np.max(np.flatnonzero(course.change[:first] > 0), initial=-1)) + 1
        since = max(fallen, course.settled if course.settled < first else 0)
        first = since + int(np.argmax(course.skipped[since:]))
    lost, tried = int(course.skipped[first:].sum()), course.skipped.size - first
    return _Found(
        ScaleVerdict.COLLAPSED,
        Severity.ERROR,
        first,
        f"The newest step ran with a scale of {in_words(lowest)}, down from {in_words(float(course.scale[first]))}: "
        f"{lost:,} of the last {_steps(tried)} were skipped, "
        f"{f'the last {count:,} of them in a row' if count > 1 else 'the newest too'}, "
        f"so a smaller scale is no cure.{hopeless_in_words(course, course.since(first))}",
        cure(course, course.since(first)),
    )


def _stands_still(course: ScaleCourse, first: int) -> bool:
    """Whether steps are skipped although the scale no longer falls."""
    latest = course.change[first:][-STANDSTILL:]
    return latest.size == STANDSTILL and not latest.any()


def _floored(course: ScaleCourse) -> _Found | None:
    """The scale has come to lie where it helps nobody: below 1, or at a floor where steps are skipped all the same."""
    starts, ends = course.rows
    current = in_words(float(course.scale[-1]))
    if ends.size and ends[-1] == course.skipped.size and _stands_still(course, int(starts[-1])):
        first = int(starts[-1])
        among = course.since(first)
        why = (
            f"The scale stands at {current} and does not fall, though the last {ends[-1] - first:,} steps were all "
            f"skipped.{hopeless_in_words(course, among)}"
        )
        return _Found(ScaleVerdict.FLOORED, Severity.ERROR, first, why, cure(course, among))
    useful = np.flatnonzero(course.scale >= LOWEST_USEFUL_SCALE)
    first = int(useful[-1]) + 1 if useful.size else 0
    count = course.scale.size - first
    return _below_one(course, first) if count >= CALIBRATION_STEPS else None


def _below_one(course: ScaleCourse, first: int) -> _Found:
    """Why the scale lies below 1: skips at a larger scale, or a loss that is not finite; without skips nobody knows."""
    shrinks = (
        f"The scale has been below 1 for the last {course.scale.size - first:,} steps, at "
        f"{in_words(float(course.scale[-1]))} now: it makes gradients smaller instead of larger"
    )
    low = course.scale <= LOWEST_USEFUL_SCALE
    said = hopeless_in_words(course, low, "at a scale of 1 or less")
    if prevail(course, low):
        first = int(np.argmax(course.hopeless & low))
        return _Found(ScaleVerdict.FLOORED, Severity.WARNING, first, f"{shrinks}.{said}", CURE)
    if not (course.skipped & ~course.hopeless).any():
        return _Found(ScaleVerdict.FLOORED, Severity.WARNING, first, f"{shrinks}.{said}", (_START_HIGHER,))
    why = f"{shrinks}, because at larger scales gradients were not finite.{said}"
    return _Found(ScaleVerdict.FLOORED, Severity.WARNING, first, why, (SMALLER_LOSS,))


_START_HIGHER = Remedy(
    text="No gradient was too large for a larger scale: start at 1 or above.",
    code="scaler = torch.amp.GradScaler(init_scale=2.0**16)",
    untried=cause_entry.SCALER,
)


def _oscillating(course: ScaleCourse) -> _Found | None:
    """Up and down so often that a good part of the steps is lost, long after calibration."""
    starts, _ = course.rows
    swings = int((starts >= course.settled).sum())
    after = course.skipped.size - course.settled
    share = course.lost / after if after else 0.0
    if swings < FEWEST_SWINGS or share < PROBING_SHARE:
        return None
    interval = course.settings.growth_interval
    ceilings = course.scale[starts[starts >= course.settled]]
    lost = f"After it had settled, {course.lost:,} of {after:,} steps ({share:.0%}) were lost in {swings:,} backoffs"
    severity = Severity.WARNING if share >= HEAVY_SHARE else Severity.INFO
    among = course.since(course.settled)
    said = hopeless_in_words(course, among)
    if prevail(course, among):
        return _Found(ScaleVerdict.OSCILLATING, severity, course.settled, f"{lost}.{said}", CURE)
    probes = interval is not None and float(ceilings.max()) <= 2 * float(ceilings.min())
    why = (
        f"it grows after {_steps(int(interval))} in a row without a skip, and each time that is too much"
        if probes and interval is not None
        else f"the gradients' own size varies, so that it was too large at {in_words(float(ceilings.min()))} already "
        f"and at {in_words(float(ceilings.max()))} only"
    )
    return _Found(
        ScaleVerdict.OSCILLATING,
        severity,
        course.settled,
        f"{lost}: {why}.{said}",
        _grow_less(course) if probes else _smooth(),
    )


def _runaway(course: ScaleCourse) -> _Found | None:
    """Nothing ever overflows: the scale is of no use, or what overflows is hidden from it."""
    if course.scale[-1] < RUNAWAY_SCALE:
        return None
    last_fall = int(np.max(np.flatnonzero(course.change < 0), initial=-1)) + 1
    growths = int((course.change[last_fall:] > 0).sum())
    if not growths:
        return None
    return _Found(
        ScaleVerdict.RUNAWAY,
        Severity.INFO,
        last_fall,
        f"The scale has grown {times(growths)} without a skip, to {in_words(float(course.scale[-1]))}, where no "
        "float16 gradient could stay finite: the gradients are zero, computed in another dtype, or made finite "
        "before the scaler sees them.",
        (
            Remedy(
                text="Without float16 gradients no scaler is needed; otherwise let it see them as they are.",
                code='scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)',
                untried=cause_entry.SCALER,
            ),
        ),
    )


def _calm(course: ScaleCourse) -> _Found:
    growths = int((course.change > 0).sum())
    early = int(course.skipped[: course.settled].sum())
    words = [f"The scale is {in_words(float(course.scale[-1]))}."]
    verdict = ScaleVerdict.STEADY
    if early:
        verdict = ScaleVerdict.CALIBRATED
        words.append(f"It lost {_steps(early)} while it found its place.")
    if course.lost:
        verdict = ScaleVerdict.PROBING
        words.append(f"Since then it grew {times(growths)} and lost {_steps(course.lost)} in doing so.")
    told = f"{' '.join(words)}{hopeless_in_words(course, course.since(0))}"
    by_scale = early - int(course.hopeless[: course.settled].sum())
    return _Found(verdict, Severity.INFO, 0, told, _start_lower(course) if by_scale >= WORTH_A_START else ())


def _start_lower(course: ScaleCourse) -> tuple[Remedy, ...]:
    held = course.held or 1.0
    return (
        Remedy(
            text=f"To lose fewer steps at the next start, begin at {in_words(held)}, the largest scale that held here.",
            code=f"scaler = torch.amp.GradScaler(init_scale={held!r})",
            untried=cause_entry.SCALER,
        ),
    )


def _grow_less(course: ScaleCourse) -> tuple[Remedy, ...]:
    interval = max(DEFAULT_INTERVAL, int(10 * (course.settings.growth_interval or 0)))
    code = f"scaler = torch.amp.GradScaler(init_scale={course.held or 1.0!r}, growth_interval={interval})"
    text = f"Let it grow less often: one step in {interval:,} is lost at most when each growth is too much."
    return (Remedy(text=text, code=code, untried=cause_entry.SCALER),)


def _smooth() -> tuple[Remedy, ...]:
    return (
        Remedy(
            text="Look at the steps that were skipped: their batches make far larger gradients than the others. A loss "
            "averaged over more samples, or bfloat16, takes them.",
            untried=cause_entry.SCALER,
        ),
    )


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count:,} steps"


def _health(course: ScaleCourse, optimizer: int, found: _Found) -> ScaleHealth:
    return ScaleHealth(
        optimizer=optimizer,
        verdict=found.verdict,
        severity=found.severity,
        first_step=int(course.step[min(found.first, course.step.size - 1)]),
        last_step=int(course.step[-1]),
        steps=int(course.step.size),
        skipped=int(course.skipped.sum()),
        calibrating=int(course.skipped[: course.settled].sum()),
        growths=int((course.change > 0).sum()),
        backoffs=int((course.change < 0).sum()),
        current=float(course.scale[-1]),
        lowest=float(course.scale.min()),
        held=course.held,
        explanation=found.explanation,
        remedies=found.remedies,
    )
