"""Skips that no loss scale would have saved, because the loss itself was NaN or infinite: what they say of a scale."""

from __future__ import annotations

from ampscope.analysis.causes import untried
from ampscope.analysis.numerics.arrays import BoolArray
from ampscope.analysis.results import Remedy
from ampscope.analysis.scale.course import Course

#: What to do about a scale that such skips have brought down.
CURE = (
    Remedy(
        text="Cure the steps whose loss is not finite first; once they are gone, the scale grows again by itself.",
        untried=untried.SCALER,
    ),
)


def prevail(course: Course, among: BoolArray) -> bool:
    """Whether they are most of the skips among the attempts that ``among`` marks."""
    return 2 * int((course.hopeless & among).sum()) > int((course.skipped & among).sum())


def in_words(course: Course, among: BoolArray, where: str = "") -> str:
    """A sentence on those among the marked attempts, with a space before it; empty where there are none."""
    count, skips = int((course.hopeless & among).sum()), int((course.skipped & among).sum())
    if not count:
        return ""
    which = f"all {skips:,}" if count == skips else f"{count:,} of the {skips:,}"
    steps = " ".join(filter(None, (f"{which} steps skipped" if skips > 1 else "the step skipped", where)))
    return f" In {steps} the loss itself was NaN or infinite, which no scale would have saved."


def cure(course: Course, among: BoolArray) -> tuple[Remedy, ...]:
    """What to do where they prevail; empty elsewhere."""
    return CURE if prevail(course, among) else ()
