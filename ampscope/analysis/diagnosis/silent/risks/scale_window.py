"""The loss scales at which gradients neither overflow nor vanish, and a scale that lies below them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.causes.ahead import OutsideWindow
from ampscope.analysis.diagnosis.silent.risks.learnt import is_learnt
from ampscope.analysis.diagnosis.silent.risks.warning import Warnings
from ampscope.analysis.precision.ranges.measured import MeasuredPlace
from ampscope.analysis.precision.ranges.places import place_of
from ampscope.analysis.precision.ranges.sampled_steps import EACH_SCALE
from ampscope.analysis.results import Incident
from ampscope.analysis.scale.window import LEAST_LOOKS, MOSTLY
from ampscope.analysis.tables.lazy_tables import collect_expressions, rank_table
from ampscope.analysis.tables.step_history import History
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import OpRow, Phase, Source, Table, source_of
from ampscope.trace.vocabulary import Cause

#: The share of values that a window may leave below float16's normal numbers: a tail is no loss.
TAIL = 0.01
#: Bits that a window has at least: a scale that grows twice has to find room.
LEAST_WINDOW = 2.0
_HALF = FINFO["float16"]


@dataclass(frozen=True, slots=True)
class _Spread:
    """Where the non-zero values of all float16 gradients of a step lie, loss scale included."""

    counts: dict[int, int]  #: by exponent
    largest: float
    subnormal: int
    zeros: int
    lowest: OpRow  #: the row with the most subnormal values

    @property
    def share(self) -> float:
        """Subnormal ones among them."""
        return self.subnormal / max(1, sum(self.counts.values()))

    @property
    def zero_share(self) -> float:
        """Zeros among all values; what was flushed is not among the others any more."""
        return self.zeros / max(1, self.zeros + sum(self.counts.values()))

    @property
    def low_end(self) -> int:
        """The exponent below which only the tail lies."""
        left = TAIL * sum(self.counts.values())
        for exponent in sorted(self.counts):
            left -= self.counts[exponent]
            if left < 0:
                return max(exponent, _HALF.lowest)  # a damaged table says anything
        return _HALF.normal


def scale_window(make: Warnings, history: Mapping[int, History]) -> Incident | None:
    """The warning of a loss scale below the window in which nothing is lost, at the newest step that tells it."""
    step = _newest_measured(make)
    if step is None or 0 not in history:
        return None
    scale = _scale_at(history[0], step)
    spread = _spread(make, step)
    if scale is None or spread is None or spread.share < MOSTLY:
        return None
    high = scale * 2.0 ** math.floor(math.log2(_HALF.max / spread.largest))
    low = scale * 2.0 ** (_HALF.normal - spread.low_end)
    if not math.isfinite(high) or low <= scale or math.log2(high / low) < LEAST_WINDOW:
        return None
    place = place_of(make.sites[spread.lowest.site], spread.lowest.out, 0)
    seen = next((each for each in make.measured.places if each.place == place), None)
    if seen is None or len(seen.course) < LEAST_LOOKS or _has_fallen(seen, history[0], low / scale):
        return None
    zeros = spread.zero_share
    reason = OutsideWindow(
        scale=scale, low=low, high=high, share=spread.share, zeros=zeros, least=zeros > TAIL, step=step
    )
    return make.warning(Cause.SCALE_WINDOW, reason, seen, make.graph(seen, step), spread.lowest.seq)


def _has_fallen(seen: MeasuredPlace, history: History, missing: float) -> bool:
    """Whether gradients lie low because the loss was learnt: they fell with it by what the scale is short of."""
    heights = [height for _, height in seen.course]
    part = max(1, len(heights) // 5)
    fallen = float(np.median(heights[:part])) - float(np.median(heights[-part:])) if heights else 0.0
    if fallen < max(math.log2(missing), 0.0):
        return False
    return is_learnt(history, seen.course[0][0], seen.course[-1][0], fallen)


def _scale_at(history: History, step: int) -> float | None:
    """The loss scale that a step ran with; None without one that can be."""
    found = history.scale[history.step == step]
    return float(found[0]) if found.size and math.isfinite(found[0]) and found[0] > 0 else None


def _newest_measured(make: Warnings) -> int | None:
    """The newest step with full statistics of its gradients, among the newest that a course is drawn through."""
    live = source_of(Source.LIVE, 0)
    backward = [number for number, site in make.sites.rows.items() if site.phase == Phase.BACKWARD]
    if not backward or not make.measured.live or not make.measured.course:
        return None
    ops = rank_table(make.run, Table.OPS, make.sites.rank, step=make.measured.course[-EACH_SCALE:])
    where = f"source = '{live}' AND subnormals IS NOT NULL AND site IN ({', '.join(map(str, backward))})"
    found = collect_expressions(ops, "step", where=where, order="step DESC", limit=1)
    return int(found[0][0]) if found else None


def _spread(make: Warnings, step: int) -> _Spread | None:
    rows = make.run.rows(Table.OPS, step=step, source=source_of(Source.LIVE, 0), rank=make.sites.rank)
    gradients = [row for row in rows if _is_half_gradient(make, row)]
    if not gradients:
        return None
    counts: dict[int, int] = {}
    for row in gradients:
        for number, count in enumerate(_counts(row)):
            exponent = (row.statistics.exp_low or 0) + number
            counts[exponent] = counts.get(exponent, 0) + count
    largest = max(row.statistics.max_finite or 0.0 for row in gradients)
    if not _HALF.smallest_subnormal <= largest <= _HALF.max:
        return None
    subnormal, zeros = (
        sum(getattr(row.statistics, name) or 0 for row in gradients) for name in ("subnormals", "zeros")
    )
    return _Spread(counts, largest, subnormal, zeros, max(gradients, key=lambda row: row.statistics.subnormals or 0))


def _counts(row: OpRow) -> Sequence[int]:
    return row.statistics.exp_counts or ()


def _is_half_gradient(make: Warnings, row: OpRow) -> bool:
    site = make.sites[row.site]
    half = 0 <= row.out < len(site.out_dtypes) and site.out_dtypes[row.out] == "float16"
    return half and site.phase == Phase.BACKWARD and row.statistics.subnormals is not None
