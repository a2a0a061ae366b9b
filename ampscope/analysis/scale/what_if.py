"""The loss scale's history as it would have been with other settings, as far as the recorded one can tell.

Each attempt told something of the largest scale it would have borne: one that worked bears its own scale, one that was
skipped does not. Between what is proven, the nearest attempt in time with a larger scale is taken as the measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import narwhals as nw
import numpy as np

from ampscope.analysis.arrays import BoolArray, Curve, FloatArray, IntArray, make_curve, thin_marks
from ampscope.analysis.scale.scaler_course import ScaleCourse, ScalerSettings
from ampscope.analysis.tables.lazy_tables import first_rank
from ampscope.analysis.tables.step_history import in_order, step_optimizers, steps_of
from ampscope.trace.read.run import Run

_SMALLEST = float(np.finfo(np.float64).tiny)
#: Scales are told apart to a quarter of a power of two.
_RUNGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerRules:
    """How a scaler behaves; the defaults are ``GradScaler``'s own, which knows no floor."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 0.0

    @classmethod
    def of(cls, settings: ScalerSettings, first: float | None) -> ScalerRules:
        """How a scaler was made; where that was not recorded, its ``first`` scale and ``GradScaler``'s own defaults."""
        usual = cls()
        return cls(
            init_scale=settings.init_scale or first or usual.init_scale,
            growth_factor=settings.growth_factor or usual.growth_factor,
            backoff_factor=settings.backoff_factor or usual.backoff_factor,
            growth_interval=int(settings.growth_interval or usual.growth_interval),
        )


def scale_record(run: Run, *, optimizer: int | None = None, rank: int | None = None) -> ScaleCourse:
    """The attempts of ``optimizer`` on ``rank`` (by default the run's first) that had a loss scale, in order."""
    rank = first_rank(run) if rank is None else rank
    chosen = next(iter(step_optimizers(run, rank)), 0) if optimizer is None else optimizer
    scaled = steps_of(run, rank, chosen).filter(~nw.col("scale").is_null())
    return ScaleCourse.of(in_order(scaled.select("step", "scale", "skipped", "loss")))


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Describes the course of the loss scale under other rules, beside the recorded one."""

    rules: ScalerRules
    steps: int = 0
    skipped: int = 0
    was_skipped: int = 0
    unsaved: int = 0  #: of the skipped, those that no scale would have saved
    proven: int = 0  #: steps whose outcome the record proves; of the others it is an estimate
    lowest: float | None = None
    current: float | None = None
    log2_scale: Curve = field(default_factory=Curve)
    skips: tuple[int, ...] = ()  #: thinned; `skipped` is the true number


def what_if(record: ScaleCourse, rules: ScalerRules) -> WhatIf:
    """Run a scaler with other rules over the recorded attempts; an empty record gives an empty answer."""
    if not record.step.size:
        return WhatIf(rules=rules)
    limit = bearable(record)
    scales, skipped = _simulated(limit, record.hopeless, rules)
    worked = ~record.skipped & (scales <= record.scale)
    failed = record.skipped & (scales >= record.scale)
    return WhatIf(
        rules=rules,
        steps=record.step.size,
        skipped=int(skipped.sum()),
        was_skipped=int(record.skipped.sum()),
        unsaved=int(record.hopeless.sum()),
        proven=int((worked | failed | record.hopeless).sum()),
        lowest=float(scales.min()),
        current=float(scales[-1]),
        log2_scale=make_curve(record.step, np.log2(np.maximum(scales, _SMALLEST))),
        skips=thin_marks(record.step[skipped]),
    )


def bearable(record: ScaleCourse) -> FloatArray:
    """The largest loss scale that each attempt is taken to bear, float64; infinite where nothing tells of a limit."""
    by_scale = np.flatnonzero(record.skipped & ~record.hopeless)
    good = np.flatnonzero(~record.skipped)
    limit = np.where(record.skipped, 0.0, record.scale)
    limit[by_scale] = _of_skips(record, by_scale, good)
    rung = np.round(_RUNGS * np.log2(np.maximum(record.scale, _SMALLEST)))
    for height in np.unique(rung[good])[::-1]:  # from the highest down: the lower ones look up to the higher
        mine = good[rung[good] == height]
        above = np.sort(np.concatenate([by_scale[rung[by_scale] >= height], good[rung[good] > height]]))
        told = limit[above[_nearest(above, mine)]] if above.size else np.inf
        limit[mine] = np.maximum(record.scale[mine], told)
    return limit


def _of_skips(record: ScaleCourse, skips: IntArray, good: IntArray) -> FloatArray:
    """A skipped attempt bears what the one that ended its row of skips was run with; without it, half its own."""
    own = record.scale[skips]
    after = np.searchsorted(good, skips)
    ended = after < good.size
    found = np.zeros_like(own)
    found[ended] = record.scale[good[after[ended]]]
    return np.where((found > 0) & (found < own), found, own / 2)


def _nearest(marks: IntArray, positions: IntArray) -> IntArray:
    """For each position the index of the mark that is nearest to it."""
    right = np.clip(np.searchsorted(marks, positions), 0, marks.size - 1)
    left = np.maximum(right - 1, 0)
    closer = np.abs(marks[left] - positions) <= np.abs(marks[right] - positions)
    return np.where(closer, left, right)


def _simulated(limit: FloatArray, hopeless: BoolArray, rules: ScalerRules) -> tuple[FloatArray, BoolArray]:
    """The scale of every attempt and whether it is skipped, by ``GradScaler.update``'s own rules and the floor.

    A ``GradScaler`` keeps its scale in float32, and lets it be where it would grow to infinity.
    """
    scale, good = _single(max(rules.init_scale, rules.floor)), 0
    scales, skipped = np.empty(limit.size), np.empty(limit.size, dtype=np.bool_)
    for place, (bears, lost) in enumerate(zip(limit.tolist(), hopeless.tolist(), strict=True)):
        scales[place] = scale
        skipped[place] = bad = lost or scale > bears
        good = 0 if bad else good + 1
        if bad:
            scale = max(_single(scale * rules.backoff_factor), rules.floor)
        elif good == rules.growth_interval:
            grown = _single(scale * rules.growth_factor)
            scale, good = grown if grown < math.inf else scale, 0
    return scales, skipped


def _single(scale: float) -> float:
    """Returns the scale as float32 keeps it."""
    with np.errstate(over="ignore"):
        return float(np.float32(scale))
