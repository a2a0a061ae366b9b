"""The figure of one place over steps: its largest magnitude, the ends of its dtype, and where it is going."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.arrays import Curve
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail
from ampscope.analysis.words import power_of_two
from ampscope.report.figures.axis import Axis, step_axis
from ampscope.report.numbers import count, value
from ampscope.trace.dtypes import FINFO

#: An end of the dtype is in the picture where it is at most this many powers of two away.
_IN_SIGHT = 26.0
#: Room above and below, in powers of two, and above as a share of what there is: for the words of an end.
_AIR, _FOR_WORDS = 0.7, 0.12
#: Powers of two between two labels, the smallest that leaves at most so many.
_STRIDES, _LABELS = (1, 2, 4, 8, 16, 32, 64, 128, 256), 8


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """An end of the dtype, as a line."""

    power: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cone:
    """The forecast of a course: from its newest point to the end of the dtype."""

    start: int  #: step
    power: float  #: at the start
    end: float  #: power
    step: int  #: most likely,
    low: int  #: not before this one,
    high: int  #: nor after it
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseFigure:
    """The figure; heights are powers of two."""

    label: str
    axis_name: str
    course: Curve
    ends: tuple[End, ...]
    cone: Cone | None
    overflows: tuple[int, ...]  #: steps
    marked: int | None  #: a step that is looked at
    low: float
    high: float
    ticks: tuple[tuple[int, str], ...]

    @property
    def axis(self) -> Axis:
        """Returns the axis of the steps that the figure covers."""
        steps = [*self.course.steps, *self.overflows, *((self.cone.high,) if self.cone is not None else ())]
        return step_axis(steps or [self.marked or 0])

    def words(self, power: float) -> str:
        """Returns the text for a point of the course."""
        return f"largest magnitude {value(2.0**power)}"


def course_figure(seen: PlaceDetail, *, marked: int | None = None) -> CourseFigure:
    """The picture of a place.

    Args:
        seen: The place close up.
        marked: A step to be marked.
    """
    heights = seen.course.values or (seen.limit,)
    ends = tuple(_ends(seen, min(heights), max(heights)))
    powers = [*heights, *(end.power for end in ends)]
    extent = max(powers) - min(powers)
    low, high = min(powers) - _AIR, max(powers) + max(_AIR, _FOR_WORDS * extent)
    stride = next((stride for stride in _STRIDES if (high - low) / stride <= _LABELS), _STRIDES[-1])
    ticks = [power for power in range(math.ceil(low), math.floor(high) + 1) if power % stride == 0]
    return CourseFigure(
        label="Largest magnitude by sampled step",
        axis_name="largest magnitude of a sampled step",
        course=seen.course,
        ends=ends,
        cone=_cone(seen),
        overflows=seen.overflows,
        marked=marked,
        low=low,
        high=high,
        ticks=tuple((power, power_of_two(power)) for power in ticks),
    )


def _ends(seen: PlaceDetail, lowest: float, highest: float) -> list[End]:
    own = FINFO[seen.row.dtype]
    found = []
    if seen.limit - highest <= _IN_SIGHT or seen.forecast is not None or seen.overflows:
        found.append(End(power=seen.limit, words=f"{own.name} overflows above {value(own.max)}"))
    if lowest - seen.normal <= _IN_SIGHT / 2:
        words = f"{own.name} is subnormal below {power_of_two(own.normal)}"
        found.append(End(power=seen.normal, words=words))
    return found


def _cone(seen: PlaceDetail) -> Cone | None:
    ahead = seen.forecast
    if ahead is None or not seen.course.steps:
        return None
    return Cone(
        start=seen.course.steps[-1],
        power=seen.course.values[-1],
        end=seen.limit,
        step=ahead.step,
        low=ahead.low,
        high=ahead.high,
        words=f"overflows near step {count(ahead.step)} ({count(ahead.low)} to {count(ahead.high)})",
    )
