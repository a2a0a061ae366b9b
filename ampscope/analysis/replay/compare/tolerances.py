"""How far the results of an op may be apart by rounding alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.numerics.dtypes import plain
from ampscope.analysis.replay.compare.changed_sites import Change, site_changes
from ampscope.analysis.replay.compare.pair_of_steps import StepPair, elements, pair_of
from ampscope.analysis.replay.compare.sides import Opened
from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.tables.traced_steps import TracedStep, traced_steps
from ampscope.trace.dtypes import FINFO, PARTS
from ampscope.trace.schema import SiteRow, Source

#: Units in the last place of the coarser dtype by which one op's result may differ. Rounding to nearest is off by half
#: a unit in each step; operands that were rounded bring as much each; kernels add in another order.
ULPS = 4.0
#: The largest noise that is believed.
_MOST_NOISE = 1 / 16
_MOST_OF_CURVE = 1e-2
#: Ops whose result is a sum of products: rounding grows with the square root of their number.
_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "linear", "dot", "addbmm"}
)
_SUMS = frozenset({"sum", "mean", "cumsum", "var", "var_mean", "native_layer_norm_backward", "native_batch_norm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is known of the two steps beforehand."""

    tolerance: float | None = None  #: asked for
    noise: float = 0.0  #: by which two executions of one step are apart
    scales: tuple[float | None, float | None] = (None, None)  #: loss scales in use


def rounding(one: SiteRow, other: SiteRow) -> float:
    """The share of its magnitude by which an op's result may differ where its operands are the same.

    A few units in the last place of the coarsest dtype that it reads or writes in either step; of a sum over n numbers,
    which is kept in float32 where it is not wider, also float32's unit times the square root of n.
    """
    steps = [_unit(dtype) for site in (one, other) for dtype in (*site.in_dtypes, *site.out_dtypes)]
    coarsest = max(steps, default=0.0)
    if not coarsest:
        return 0.0
    kept = min(coarsest, FINFO["float32"].eps)
    return ULPS * max(coarsest, kept * math.sqrt(max(_terms(one), _terms(other))))


def _unit(dtype: str) -> float:
    name = plain(dtype)
    info = FINFO.get(PARTS.get(name, name))
    return info.eps if info else 0.0


def _terms(site: SiteRow) -> float:
    """How many numbers are added up for one element of the result."""
    name = site.op.partition(".")[2].partition(".")[0]
    sizes = [elements(shape) for shape in site.in_shapes]
    result = max(elements(site.out_shapes[0]) if site.out_shapes else 1, 1)
    if name in _PRODUCTS and len(sizes) >= 2:
        first, second = sizes[-2:]
        return max(math.sqrt(first * second / result), 1.0)
    return max(max(sizes, default=1) / result, 1.0) if name in _SUMS else 1.0


class PointPairs:
    """What two program points say of a pair of ops, each asked once.

    Args:
        pair: The steps.
        expected: What is known of them beforehand.
    """

    def __init__(self, pair: StepPair, expected: Expected) -> None:
        self.pair, self.expected = pair, expected
        self._changes: dict[tuple[int, int], tuple[Change, ...]] = {}
        self._rounding: dict[tuple[int, int], float] = {}

    def changes(self, here: int, there: int) -> tuple[Change, ...]:
        """What is another about them."""
        key = self._key(here, there)
        if key not in self._changes:
            self._changes[key] = site_changes(self.pair.one.sites[key[0]], self.pair.other.sites[key[1]])
        return self._changes[key]

    def limit(self, here: int, there: int) -> float:
        """By how much the op's result may be apart, given the same operands."""
        key = self._key(here, there)
        if key not in self._rounding:
            self._rounding[key] = rounding(self.pair.one.sites[key[0]], self.pair.other.sites[key[1]])
        return self.asked(self._rounding[key])

    def asked(self, derived: float) -> float:
        """A tolerance, or what was asked for in its place."""
        return max(derived, self.expected.noise) if self.expected.tolerance is None else self.expected.tolerance

    def _key(self, here: int, there: int) -> tuple[int, int]:
        return int(self.pair.one.site[here]), int(self.pair.other.site[there])


def curve_tolerance(recordings: list[Recording], widest: float) -> float:
    """By how much a loss may be apart, where no traced step parts.

    Units of the coarsest dtype that a step computes in (float32's without a trace); more where rounding adds up on the
    way to the loss, which ``widest`` says, but for that at most `_MOST_OF_CURVE`.
    """
    units = [_unit(dtype) for seen in recordings for site in seen.sites for dtype in site.out_dtypes]
    least = ULPS * max(units, default=0.0) or ULPS * FINFO["float32"].eps
    return max(least, min(widest, _MOST_OF_CURVE))


def replay_noise(one: Opened, other: Opened) -> float:
    """By how much two executions of one step were apart, where a run has traced a step as it ran and again in a replay.

    Their inputs must have been the same to the last bit. At most `_MOST_NOISE`: a replay farther away than that is
    another step.
    """
    return max(_noise(each) for each in (one, other))


def _noise(side: Opened) -> float:
    found: dict[int, dict[str, TracedStep]] = {}
    for each in traced_steps(side.run, rank=side.rank):
        found.setdefault(each.step, {})[each.source] = each
    twice = next((each for each in found.values() if {Source.LIVE, Source.REPLAY} <= each.keys()), None)
    if twice is None:
        return 0.0
    pair = pair_of(*(recording(side.run, twice[source]) for source in (Source.LIVE, Source.REPLAY)))
    errors = pair.error[np.isfinite(pair.error)]
    worst = float(errors.max()) if len(errors) else 0.0
    return 0.0 if pair.given_apart.any() or worst > _MOST_NOISE else worst
