"""The loss scales at which gradients fit float16: none flushed to zero, none past its largest number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ampscope.analysis.arrays import BoolArray, FloatArray
from ampscope.analysis.rounding import FORMATS, plain
from ampscope.analysis.tables.exponent_rows import (
    CountedExecution,
    Measured,
    MeasuredRow,
    counted,
    executions,
    measured_rows,
)
from ampscope.analysis.tables.lazy_tables import collect_rows
from ampscope.analysis.words import op_in_words
from ampscope.trace.dtypes import FINFO, HALF_DTYPES
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Node, Phase, SiteRow, Source, Table, execution_of

#: Executions with counted gradients that are looked at: the newest, for gradients change as a training goes on.
NEWEST = 8
#: A scale saves the gradients if at most this share of the values that are not zero is flushed to zero.
SAVED = 0.01
#: From this share of values below float16's normal numbers on, the gradients as a whole lie too low; with fewer a
#: larger scale would keep more, and the run does without.
MOSTLY = 0.5
#: Recorded steps of fewer than which nothing is said against a scale: it may still find its place.
LEAST_LOOKS = 3
#: Scales that are tried, and those whose losses are told, as powers of two.
_POWERS, _SHOWN = range(41), range(0, 25, 2)
_HALF = FORMATS["float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientWindow:
    """The scales at which one parameter's gradient fits float16, over the steps in which its exponents were counted."""

    parameter: str
    passes_half: bool  #: whether it comes out of an op in half precision; others fit whatever the scale is
    steps: int
    scale: float  #: of the newest of them; 1 without a scaler
    zero_share: float  #: exactly zero as recorded: truly so, or flushed before anybody looked
    subnormal_share: float | None  #: of the values that are not zero, subnormal in float16 at the scale they had
    low: (
        float | None
    )  #: the smallest scale that saves it, 1 where none is needed; null where all of it is zero, or none does
    high: float | None  #: the largest at which none of it overflows
    exact: bool  #: measured in a wider dtype; else what was flushed is not known, and `low` keeps all from subnormals


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLoss:
    """Describes what becomes of the measured non-zero gradient values at one loss scale."""

    scale: float
    lost_share: float  #: flushed to zero
    subnormal_share: float  #: kept with fewer bits
    overflow_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPart:
    """One of several optimizers, and what it steps."""

    optimizer: int
    parameters: tuple[str, ...]  #: names of those whose gradients were recorded

    @property
    def modules(self) -> tuple[str, ...]:
        """The outermost modules that hold them."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWindow:
    """The scales at which all gradients fit float16, and what is lost at others."""

    low: float | None = None  #: the smallest that saves the gradients together; null where nothing was counted
    high: float | None = (
        None  #: the largest at which nothing in the backward overflows; null where nothing was measured
    )
    limited_by: str = ""  #: what overflows first
    steps: tuple[int, ...] = ()  #: those whose gradients were counted
    unmeasured: int = 0  #: trained parameters whose gradient never was
    zero_share: float | None = None  #: of the gradients that pass half precision
    exact: bool = False  #: of all
    parameters: tuple[GradientWindow, ...] = ()
    at_scale: tuple[ScaleLoss, ...] = ()  #: at powers of two; empty where nothing was counted
    optimizer: int | None = None  #: whose steps these are; null for those of all
    optimizers: tuple[OptimizerPart, ...] = ()  #: of the run; empty where it has one


def scale_window(run: Run, rank: int, optimizer: int | None = None, *, at: float | None = None) -> ScaleWindow:
    """The window of one rank's newest measured steps.

    Args:
        run: The run.
        rank: One of its ranks.
        optimizer: Whose steps; of all by default.
        at: A scale at which losses are told besides the powers of two.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    sources = (Source.LIVE, Source.REPLAY, Source.REPLAY_FP32)
    done = [each for each in executions(run, rank, sources=sources) if optimizer in (None, each.optimizer)]
    nodes = {number: site for number, site in sites.items() if site.op == Node.GRADIENT}
    halves = _through_half(nodes.values(), sites.values())
    measured = measured_rows(run, rank, _wide_first(counted(run, rank, done, NEWEST, nodes))[-NEWEST:], sites=nodes)
    parts = _optimizers(run, rank)
    others = {name for part in parts if optimizer not in (None, part.optimizer) for name in part.parameters}
    params = [row for row in run.rows(Table.PARAMS, rank=rank) if row.name not in others]
    trained = sum(row.requires_grad and row.kind == Node.PARAMETER for row in params)
    found = _Gradients(measured, halves).window(at) if measured.rows else ScaleWindow()
    highs = [(one.high, one.parameter) for one in found.parameters if one.high is not None and one.passes_half]
    high, name = min((*highs, *_tops(run, rank, done, sites)), default=(None, ""))
    found = replace(found, high=high, limited_by=name, unmeasured=max(0, trained - len(found.parameters)))
    return replace(found, optimizer=optimizer if parts else None, optimizers=parts)


def _optimizers(run: Run, rank: int) -> tuple[OptimizerPart, ...]:
    """Lists several optimizers with what each steps; empty where there is one."""
    names = {row.param: row.name for row in run.rows(Table.PARAMS, rank=rank)}
    held: dict[int, list[str]] = {}
    pairs = collect_rows(
        run.table(Table.GRADS, rank=rank), "optimizer, param", "optimizer, param", order="optimizer, param"
    )
    for optimizer, param in pairs:
        held.setdefault(optimizer, []).append(names.get(param, ""))
    parts = (OptimizerPart(optimizer=number, parameters=tuple(own)) for number, own in held.items())
    return tuple(parts) if len(held) > 1 else ()


def _wide_first(done: Sequence[CountedExecution]) -> list[CountedExecution]:
    """Drops the other executions of a step that was also run in float32: nothing was flushed there."""
    wide = {(each.step, each.optimizer) for each in done if _is_wide(each)}
    return [each for each in done if _is_wide(each) or (each.step, each.optimizer) not in wide]


def _is_wide(execution: CountedExecution) -> bool:
    return execution_of(execution.source)[0] == Source.REPLAY_FP32


def _through_half(gradients: Iterable[SiteRow], sites: Iterable[SiteRow]) -> dict[str, str]:
    """The half dtype that each parameter's gradient comes out of; of no known one, all as if they did.

    Autocast's cast of a weight has its mirror in backward, in the same module and of the same shape.
    """
    casts: dict[tuple[str, str], str] = {}
    for site in sites:
        if site.phase == Phase.BACKWARD and site.in_dtypes and site.out_dtypes:
            came, is_cast = plain(site.in_dtypes[0]), plain(site.out_dtypes[0]) not in HALF_DTYPES
            if came in HALF_DTYPES and is_cast and len(site.in_dtypes) == 1:
                casts[site.module, site.out_shapes[0]] = came
    found: dict[str, str] = {}
    for site in gradients:
        own = plain(site.out_dtypes[0])
        half = own if own in HALF_DTYPES else casts.get((site.module, site.out_shapes[0]))
        if half is not None:
            found[site.name] = half
    return found


def _tops(
    run: Run, rank: int, done: Sequence[CountedExecution], sites: Mapping[int, SiteRow]
) -> Iterator[tuple[float, str]]:
    """The largest scale that the ops of each of the newest backwards bear, and the op that is first to overflow."""
    newest = {(each.step, each.source): each for each in done if not _is_wide(each)}
    steps = sorted({step for step, _ in newest})[-NEWEST:]
    narrow = [n for n, site in sites.items() if site.phase == Phase.BACKWARD and _gives(site, HALF_DTYPES)]
    if not any(HALF_DTYPES.intersection(map(plain, (*site.in_dtypes, *site.out_dtypes))) for site in sites.values()):
        # a run in float32: as if it were in float16
        narrow = [n for n, site in sites.items() if site.phase == Phase.BACKWARD and _gives(site, FINFO)]
    if not steps or not narrow:
        return
    where = f'site IN ({_listed(narrow)}) AND out = 0 AND isfinite("min") AND isfinite("max")'
    size = 'greatest(abs("min"), abs("max"))'
    columns = f"step, source, site, max({size}) AS size"
    tops: dict[tuple[int, str], tuple[float, int]] = {}  # of ops as large, that of the lowest site
    for step, source, site, top in collect_rows(
        run.table(Table.OPS, step=steps, rank=rank), columns, "step, source, site", where=where
    ):
        tops[step, source] = max(tops.get((step, source), (0.0, 0)), (top, -site))
    for backward, (top, negative) in tops.items():
        if backward in newest and top > 0:
            site = sites[-negative]
            named = f"{op_in_words(site.op)} in {site.module or 'the loss code'}, backward"
            yield _power_below(_HALF.overflow * newest[backward].scale / top), named


def _gives(site: SiteRow, dtypes: Collection[str]) -> bool:
    return bool(site.out_dtypes) and plain(site.out_dtypes[0]) in dtypes


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _power_below(scale: float) -> float:
    return float(2.0 ** math.floor(math.log2(scale))) if 0 < scale < math.inf else scale


def _high(row: MeasuredRow, largest: float) -> float:
    """The largest scale that a gradient bears; without an end where it was broken before any scale."""
    if row.nan:
        return math.inf
    return row.execution.scale / 2 if row.infinite else _HALF.overflow * row.execution.scale / largest


class _Gradients:
    """Gradients whose exponents were counted.

    Args:
        measured: The rows.
        halves: The half dtype that each came out of; where none did, all are asked whether they would fit.
    """

    def __init__(self, measured: Measured, halves: Mapping[str, str]) -> None:
        self._measured, self._halves = measured, halves
        self._asked = frozenset(halves) or frozenset(row.site.name for row in measured.rows)
        self._hists = measured.exponents
        rows = [row for row, number in zip(measured.rows, measured.number, strict=True) if number is not None]
        self._names = np.array([row.site.name for row in rows], object)
        self._scales = np.array([row.execution.scale for row in rows], np.float64)
        narrow = [not _is_wide(row.execution) and halves.get(row.site.name) == "float16" for row in rows]
        below, _ = self._hists.below(_HALF.subnormal * np.ones(len(rows)))
        self._subnormal = below
        self._is_cut: BoolArray = np.array(narrow, np.bool_) & (below > SAVED * self._hists.values)
        self._highs = np.array([_high(row, top) for row, top in zip(rows, self._hists.high, strict=True)], np.float64)
        times = Counter(self._names.tolist())
        self._lost: dict[int, FloatArray] = {}  # by power of two
        self._weights = np.array([1.0 / times[name] for name in self._names.tolist()], np.float64)

    def window(self, at: float | None) -> ScaleWindow:
        """All of them together; without what the backward's own ops allow."""
        names = dict.fromkeys(row.site.name for row in self._measured.rows)
        parameters = tuple(sorted(map(self._parameter, names), key=lambda one: -(one.low or 0.0)))
        rows = [row for row in self._measured.rows if row.site.name in self._asked]
        all_asked: BoolArray = np.array([name in self._asked for name in self._names], np.bool_)
        return ScaleWindow(
            low=self._smallest(all_asked),
            steps=tuple(sorted({row.execution.step for row in self._measured.rows})),
            zero_share=sum(row.zeros for row in rows) / sum(row.numel for row in rows) if rows else None,
            exact=not self._is_cut.any(),
            parameters=parameters,
            at_scale=tuple(self._losses(all_asked, at)),
        )

    def _parameter(self, name: str) -> GradientWindow:
        rows = [row for row in self._measured.rows if row.site.name == name]
        mine: BoolArray = self._names == name
        asked, values = name in self._asked, float(self._hists.values[mine].sum())
        high = _power_below(float(np.min(self._highs[mine], initial=math.inf)))
        return GradientWindow(
            parameter=name,
            passes_half=asked,
            steps=len({row.execution.step for row in rows}),
            scale=rows[-1].execution.scale,
            zero_share=sum(row.zeros for row in rows) / max(1, sum(row.numel for row in rows)),
            subnormal_share=float(self._subnormal[mine].sum()) / values if values and asked else None,
            low=self._smallest(mine) if asked else None,
            high=high if asked and math.isfinite(high) else None,
            exact=not self._is_cut[mine].any(),
        )

    def _smallest(self, chosen: BoolArray) -> float | None:
        """The smallest power of two at which the chosen gradients are saved."""
        total = float((self._hists.values * self._weights)[chosen].sum())
        if not total:
            return None
        low, high = _POWERS[0], _POWERS[-1] + 1
        while low < high:  # losses fall as the scale rises
            middle = (low + high) // 2
            if self._lost_at(middle)[chosen].sum() <= SAVED * total:
                high = middle
            else:
                low = middle + 1
        return 2.0**low if low <= _POWERS[-1] else None

    def _lost_at(self, power: int) -> FloatArray:
        """Returns how many values are lost at a power of two.

        It is worked out once for all parameters: each is searched among the same few powers.
        """
        if power not in self._lost:
            needed = np.where(self._is_cut, _HALF.subnormal, _HALF.flushed)
            self._lost[power] = self._below(needed, 2.0**power)
        return self._lost[power]

    def _below(self, magnitudes: FloatArray | float, scale: float) -> FloatArray:
        """Values that lie below a magnitude at a scale, each parameter counting once."""
        counts, _ = self._hists.below(magnitudes * self._scales / scale, inclusive=True)
        return counts * self._weights

    def _losses(self, chosen: BoolArray, at: float | None) -> Iterator[ScaleLoss]:
        values = self._hists.values * self._weights
        total = float(values[chosen].sum())
        scales = {2.0**power for power in _SHOWN} | ({at} if at else set())
        for scale in sorted(scales) if total else ():
            lost = float(self._below(_HALF.flushed, scale)[chosen].sum()) / total
            below = float(self._below(_HALF.subnormal, scale)[chosen].sum()) / total
            fits = float(self._below(_HALF.overflow, scale)[chosen].sum()) / total
            yield ScaleLoss(
                scale=scale, lost_share=lost, subnormal_share=max(0.0, below - lost), overflow_share=max(0.0, 1 - fits)
            )
