"""How close to the ends of their dtypes the values of a run come, place by place, closest first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ampscope.analysis.overview.ranks.world import sampled_rank, world_of
from ampscope.analysis.precision.ranges.magnitudes import Magnitudes, magnitudes
from ampscope.analysis.precision.ranges.overflowed import overflowed
from ampscope.analysis.precision.ranges.places import Place
from ampscope.analysis.precision.ranges.sampled_steps import sampled_steps
from ampscope.analysis.precision.ranges.scaled_places import scaled_places
from ampscope.analysis.results import SourceLine
from ampscope.analysis.tables.step_history import History, histories
from ampscope.forecast.forecast import Forecast, Point, bits_per_step, forecast
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run

#: A trend is told as long as the run has gone on unseen for at most this share of the steps that it was seen for.
UNSEEN = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """One place, and how large its values got; magnitudes are of finite values, null where none was measured.

    It has many attributes because it is all that any view shows of a place, and the JSON of one.
    """

    module: str
    op: str
    phase: str
    dtype: str
    headroom_bits: float | None  #: factors of two between the largest magnitude of all sampled steps and overflow
    underflow_bits: float | None  #: those between the newest and the dtype's smallest normal; negative below it
    underflow_share: float | None  #: subnormal ones among the non-zero elements; null where not measured
    zero_share: float | None  #: elements that are exactly zero; likewise
    bits_per_step: float | None  #: growth over the sampled steps, robustly; null for fewer than two
    forecast_step: int | None  #: step at which it overflows if it goes on; null where nothing says that it will
    forecast_low: int | None  #: not before this step,
    forecast_high: int | None  #: nor after it
    name: str  #: of an input, parameter, buffer or gradient
    source: SourceLine | None
    largest: float | None
    newest: float | None  #: the largest magnitude of its newest sampled step
    newest_step: int | None
    scale: float | None  #: the loss scale that is in the newest
    unscaled: float | None  #: the newest without the loss scale
    steps: int  #: sampled steps in which it ran
    nonfinite: int  #: results that were not finite
    fixed: bool  #: cannot grow: a bounded function, or the same in every step
    optimizer: int
    overflowed: int = 0  #: results that were infinite though all that was read was finite, and not on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(NotebookRepr):
    """The ranges of one rank of a run."""

    rank: int = 0
    steps: int = 0  #: optimizer step attempts
    sampled_steps: int = 0  #: of which the ops were recorded as they ran
    sampled_share: float = 0.0  #: of all steps
    replayed_steps: int = 0  #: further ones, of which they were recorded in a replay
    rows: tuple[
        RangeRow, ...
    ] = ()  #: closest to overflow first; after them gradients with a loss scale, then the fixed


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredPlace:
    """A place with its course, for what looks closer than a row can; what takes fits is found when it is asked for."""

    seen: Magnitudes
    scale: float | None  #: the loss scale that is in the newest of its values
    last: int = -1  #: the newest step of the run; -1 where that is not known
    overflowed: int = 0  #: results that became infinite
    told: Forecast | None = None  #: stands for its forecast, where that is of another kind

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.seen.place

    @property
    def course(self) -> tuple[Point, ...]:
        """The logarithm of its largest magnitude by sampled step."""
        return self.seen.course

    @cached_property
    def fixed(self) -> bool:
        """Whether it cannot grow: a bounded function, or the same in every step, as constants of the code are."""
        logs = [height for _, height in self.course]
        return self.place.is_bounded or (len(logs) > 1 and max(logs) == min(logs))

    @cached_property
    def forecast(self) -> Forecast | None:
        """When it overflows; None where nothing says that it will."""
        if self.told is not None or self.fixed or self.overflowed:
            return self.told
        return self.still_ahead(forecast(self.course, math.log2(self.place.format.max)))

    def still_ahead(self, found: Forecast | None) -> Forecast | None:
        """What is left of a forecast at the end of the run; None where its time has passed, or it rests on the past."""
        if found is None or found.high <= self.last:
            return None
        newest = self.course[-1][0]
        if self.last - newest > UNSEEN * (newest - found.since):
            return None
        return found._replace(step=max(found.step, self.last + 1), low=max(found.low, self.last + 1))

    @cached_property
    def bits_per_step(self) -> float | None:
        """How fast it grows; None for fewer than two sampled steps."""
        return self.forecast.bits_per_step if self.forecast is not None else bits_per_step(self.course)

    @property
    def newest_headroom(self) -> float | None:
        """Factors of two between its newest magnitude and overflow; None where there is none."""
        return max(0.0, math.log2(self.place.format.max) - self.course[-1][1]) if self.course else None

    def with_forecast(self, ahead: Forecast) -> MeasuredPlace:
        """The place with another forecast, as that of its fall."""
        return replace(self, told=ahead)

    @property
    def row(self) -> RangeRow:
        """All that is shown of it."""
        seen, place, course, ahead = self.seen, self.place, self.course, self.forecast
        newest = float(f"{2.0 ** course[-1][1]:.9g}") if course else None  # as it was recorded, in float32
        nonzero = seen.measured - seen.zeros
        top = math.log2(place.format.max)
        return RangeRow(
            module=place.module,
            op=place.op,
            phase=place.phase,
            dtype=place.dtype,
            headroom_bits=0.0 if self.overflowed else max(0.0, top - math.log2(seen.largest)) if seen.largest else None,
            underflow_bits=course[-1][1] - place.format.normal if course else None,
            underflow_share=seen.subnormals / nonzero if nonzero > 0 else None,
            zero_share=seen.zeros / seen.measured if seen.measured else None,
            bits_per_step=self.bits_per_step,
            forecast_step=ahead.step if ahead is not None else None,
            forecast_low=ahead.low if ahead is not None else None,
            forecast_high=ahead.high if ahead is not None else None,
            name=place.name,
            source=place.source,
            largest=seen.largest,
            newest=newest,
            newest_step=course[-1][0] if course else None,
            scale=self.scale,
            unscaled=newest / self.scale if newest is not None and self.scale else None,
            steps=seen.steps,
            nonfinite=seen.bad,
            fixed=self.fixed,
            optimizer=place.optimizer,
            overflowed=self.overflowed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The measured places of one rank."""

    rank: int
    steps: int
    live: frozenset[int] = field(default_factory=frozenset)  #: steps that were traced as they ran
    replayed: int = 0  #: further ones that were in a replay
    course: tuple[int, ...] = ()  #: steps that the courses are drawn through
    places: tuple[MeasuredPlace, ...] = ()


def ranges(run: Run, *, rank: int | None = None) -> Ranges:
    """The ranges of a run's values over its sampled steps.

    Args:
        run: The run.
        rank: Whose; by default the first that was traced.

    Returns:
        No rows for a run without traced ops.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    found = measured_places(run, rank=rank)
    rows = sorted((each.row for each in found.places), key=_nearness)
    sampled = len(found.live)
    share = min(1.0, sampled / found.steps) if found.steps else 0.0
    return Ranges(
        rank=found.rank,
        steps=found.steps,
        sampled_steps=sampled,
        sampled_share=share,
        replayed_steps=found.replayed,
        rows=tuple(rows),
    )


def measured_places(run: Run, *, rank: int | None = None, whole: bool = True) -> MeasuredRun:
    """Every place of one rank that was measured, with its course; in no order.

    Args:
        run: The run.
        rank: Whose; by default the first that was traced.
        whole: Sum up all sampled steps, not only those that the courses are drawn through.
    """
    rank = sampled_rank(run, world_of(run)) if rank is None else rank
    history = histories(run, rank)
    sampled = sampled_steps(run, rank)
    found = magnitudes(run, rank, sampled, whole=whole)
    scales = {number: _Scales(each) for number, each in history.items()}
    scaled = scaled_places(
        run, rank, sampled, lambda number, step: scales[number].at(step) if number in scales else None
    )
    lost = overflowed(run, rank, sampled) if whole else {}
    last = {number: int(each.step[-1]) for number, each in history.items() if each.step.size}
    return MeasuredRun(
        rank=rank,
        steps=sum(each.step.size for each in history.values()),
        live=sampled.live,
        replayed=sampled.count - len(sampled.live),
        course=sampled.course,
        places=tuple(
            MeasuredPlace(
                seen=each,
                scale=_scale(each, scales) if each.place.is_gradient or each.place in scaled.carrying else None,
                last=last.get(each.place.optimizer, -1),
                overflowed=lost.get(each.place, 0),
            )
            for each in found
            if each.place not in scaled.scale and each.place.is_read
        ),
    )


def _nearness(row: RangeRow) -> tuple[bool, bool, bool, bool, float]:
    """What can grow before what cannot; a scale makes room by itself; then by headroom, what overflowed first."""
    headroom = row.headroom_bits
    near = math.inf if headroom is None else headroom
    return row.fixed and not row.overflowed, headroom is None, row.scale is not None, not row.overflowed, near


class _Scales:
    """The loss scale of each step of an optimizer."""

    def __init__(self, history: History) -> None:
        self._history = history

    def at(self, step: int) -> float | None:
        """The loss scale in use; None without one."""
        place = int(self._history.step.searchsorted(step))
        if place >= self._history.step.size or self._history.step[place] != step:
            return None
        scale = float(self._history.scale[place])
        return None if math.isnan(scale) else scale


def _scale(seen: Magnitudes, scales: Mapping[int, _Scales]) -> float | None:
    """The loss scale at the newest value of a place that carries it."""
    of_step = scales.get(seen.place.optimizer)
    if of_step is None or not seen.course:
        return None
    return of_step.at(seen.course[-1][0])
