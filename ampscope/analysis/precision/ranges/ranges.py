"""How close to the ends of their dtypes the values of a run come, place by place, closest first."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ampscope.analysis.precision.ranges.magnitudes import Cells
from ampscope.analysis.precision.ranges.measured import MeasuredPlace, MeasuredRun, measured_places
from ampscope.analysis.results import SourceLine
from ampscope.analysis.tables.traced_steps import only_recorded
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run


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
    flushed_share: float | None  #: elements that are zero though float32 would have kept them; null where not known
    bits_per_step: float | None  #: growth over the sampled steps, robustly; null where they span fewer than ten
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
    largest_step: int | None = None  #: sampled step in which it was largest,
    largest_last: int | None = None  #: or one up to this: neighbours are told together where very many were sampled
    key: str = ""  #: a short name of the place, the same in each run of the same code
    overflowed: int = 0  #: results that were infinite though all that was read was finite, and not on purpose
    overflowed_at_least: bool = False  #: whether there may be more, for only the newest steps were looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(NotebookRepr):
    """The ranges of one rank of a run."""

    rank: int = 0
    steps: int = 0  #: optimizer step attempts
    sampled_steps: int = 0  #: of which the ops were recorded as they ran
    sampled_share: float = 0.0  #: of all steps
    replayed_steps: int = 0  #: further ones, of which they were recorded in a replay
    places: int = 0  #: that were measured
    note: str = ""  #: that only a part of healthy steps is recorded; empty where all is
    rows: tuple[
        RangeRow, ...
    ] = ()  #: closest to overflow first; after them gradients with a loss scale, then the fixed
    scaled: int = 0  #: places, not only those with a row, whose values carry a loss scale
    scaled_overflow: RangeRow | None = None  #: the one of them that overflowed most often; null where none did


def ranges(run: Run, *, rank: int | None = None, closest: int | None = None) -> Ranges:
    """The ranges of a run's values over its sampled steps.

    Args:
        run: The run.
        rank: Whose; by default the first that was traced.
        closest: How many places have a row, all by default: each takes a fit.

    Returns:
        No rows for a run without traced ops.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    return replace(ranges_of(measured_places(run, rank=rank), closest=closest), note=only_recorded(run))


def ranges_of(found: MeasuredRun, *, closest: int | None = None) -> Ranges:
    """The ranges of what was measured on one rank, as `ranges`."""
    near = sorted(found.places, key=_nearness)[:closest]
    sampled = len(found.live)
    scaled = [each for each in found.places if each.scale is not None]
    lost = max((each for each in scaled if each.overflowed), key=lambda each: each.overflowed, default=None)
    share = min(1.0, sampled / found.steps) if found.steps else 0.0
    return Ranges(
        rank=found.rank,
        steps=found.steps,
        sampled_steps=sampled,
        sampled_share=share,
        replayed_steps=found.replayed,
        places=len(found.places),
        rows=tuple(range_row(each, found.cells) for each in near),
        scaled=len(scaled),
        scaled_overflow=range_row(lost, found.cells) if lost is not None else None,
    )


def range_row(each: MeasuredPlace, cells: Cells) -> RangeRow:
    """All that is shown of a place.

    Args:
        each: The place.
        cells: Of its rank, where all sampled steps were summed up.
    """
    when = cells.largest_in(each.seen.number)
    seen, place, course, ahead = each.seen, each.place, each.course, each.forecast
    newest = float(f"{2.0 ** course[-1][1]:.9g}") if course else None  # as it was recorded, in float32
    nonzero = seen.measured - seen.zeros
    return RangeRow(
        module=place.module,
        op=place.op,
        phase=place.phase,
        dtype=place.dtype,
        headroom_bits=_headroom(each),
        underflow_bits=course[-1][1] - place.format.normal if course else None,
        underflow_share=seen.subnormals / nonzero if nonzero > 0 else None,
        zero_share=seen.zeros / seen.measured if seen.measured else None,
        flushed_share=seen.flushed / seen.judged if seen.judged else None,
        bits_per_step=each.bits_per_step,
        forecast_step=ahead.step if ahead is not None else None,
        forecast_low=ahead.low if ahead is not None else None,
        forecast_high=ahead.high if ahead is not None else None,
        name=place.name,
        source=place.source,
        largest=seen.largest,
        newest=newest,
        newest_step=course[-1][0] if course else None,
        scale=each.scale,
        unscaled=newest / each.scale if newest is not None and each.scale else None,
        steps=seen.steps,
        nonfinite=seen.bad,
        fixed=each.fixed,
        optimizer=place.optimizer,
        key=place.key,
        largest_step=when.first if when is not None else None,
        largest_last=when.last if when is not None else None,
        overflowed=each.overflowed,
        overflowed_at_least=bool(each.overflowed) and each.overflows_at_least,
    )


def _headroom(each: MeasuredPlace) -> float | None:
    """Returns the headroom of a place's largest value; none is left where one overflowed."""
    largest = each.seen.largest
    if each.overflowed:
        return 0.0
    return max(0.0, math.log2(each.place.format.max) - math.log2(largest)) if largest else None


def _nearness(each: MeasuredPlace) -> tuple[bool, bool, bool, bool, float]:
    """Returns a sort key that puts the places nearest to overflow first.

    What can grow comes before what cannot; a scale makes room by itself; then by headroom, what overflowed first.
    """
    headroom = _headroom(each)
    near = math.inf if headroom is None else headroom
    return each.fixed and not each.overflowed, headroom is None, each.scale is not None, not each.overflowed, near
