"""Each module is judged in each format by what casting its tensors there would make of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import narwhals as nw
import numpy as np

from ampscope.analysis.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.exponents import Exponents
from ampscope.analysis.rounding import FORMATS, NumberFormat
from ampscope.analysis.tables.exponent_rows import Measured, MeasuredRow
from ampscope.analysis.tables.lazy_tables import collect
from ampscope.provenance import op_name
from ampscope.trace.read.run import Run
from ampscope.trace.schema import BLOCK, Cast, Node, Phase, SiteRow, Table

#: The MX formats, by the format of their elements.
MX = {"mxfp8_e4m3": FORMATS["float8_e4m3fn"], "mxfp8_e5m2": FORMATS["float8_e5m2"]}
#: Formats in which each tensor has a scale of its own.
SCALED = ("float8_e4m3fn", "float8_e5m2")
#: The formats of a plan, in the order in which they are told.
NAMES = ("tf32", "bfloat16", "float16", *SCALED, *MX)


class Fate(NamedTuple):
    """Counts the values of each tensor, or their mass, that more than rounding would change."""

    overflow: FloatArray
    lost: FloatArray  #: flushed to zero
    subnormal: FloatArray
    most_lost: FloatArray  #: where `lost` is an estimate, what it cannot exceed; else the same


def cast_fate(tensors: Exponents, into: NumberFormat, factors: FloatArray) -> tuple[Fate, Fate]:
    """Returns what a cast would change, by number of values and by mass.

    Args:
        tensors: The histograms.
        into: The format.
        factors: Of each tensor, what it is multiplied by before the cast.
    """
    fits = tensors.below(into.overflow / factors, inclusive=into.tie_fits)
    lost = tensors.below(into.flushed / factors, inclusive=True)
    below = tensors.below(into.subnormal / factors)
    whole = (tensors.values, tensors.mass)
    counts, masses = (
        Fate(np.maximum(all_ - fit, 0.0), gone, np.maximum(low - gone, 0.0), gone)
        for all_, fit, gone, low in zip(whole, fits, lost, below, strict=True)
    )
    return counts, masses


def block_fate(tensors: Exponents, into: NumberFormat, numel: FloatArray) -> tuple[Fate, Fate]:
    """The same for blocks that share a power of two as their scale, the one that takes the largest to the top.

    What lies in a block with what, no histogram of the whole tensor tells. Where the trace holds how far values lie
    below the largest of their block, that is counted. Elsewhere this is what is to be expected if values lie among each
    other in no order; where large ones lie together, less is lost, and `Fate.most_lost` is what no order exceeds.

    Args:
        tensors: The histograms.
        into: The format of the elements.
        numel: Of each tensor, how many elements it has, zeros among them.
    """
    bins = _Bins(tensors, numel)
    top = int(np.floor(np.log2(into.largest)))
    flushing, shrinking = top - into.lowest + 2, top - into.normal + 1
    lost = bins.beside(flushing)
    below = bins.beside(shrinking) - (bins.beside(shrinking) - bins.beside(shrinking + 1)) * 2.0**-into.mantissa_bits
    over = bins.above(into.overflow / 2.0**top) * bins.alone
    fates = (over, lost, np.maximum(below - lost, 0.0), bins.most_beside(flushing))
    expected, masses = Fate(*map(bins.sums, fates)), Fate(*(bins.sums(each * bins.mean) for each in fates))
    falls, leading = tensors.falls, bins.sums(bins.counts * bins.alone)
    gone = falls[:, flushing:].sum(1)
    low = falls[:, shrinking:].sum(1) - falls[:, shrinking] * 2.0**-into.mantissa_bits - gone
    past = falls[:, 0] * np.divide(expected.overflow, leading, where=leading > 0, out=np.zeros_like(leading))
    counted = (past, gone, np.maximum(low, 0.0), gone)
    known = ~np.isnan(falls[:, 0])
    return Fate(*(np.where(known, *each) for each in zip(counted, expected, strict=True))), masses


class _Bins:
    """The bins of all tensors as a table, a row a tensor and a column an exponent."""

    def __init__(self, tensors: Exponents, numel: FloatArray) -> None:
        self._tensors = tensors
        self._first = int(tensors.exponent.min()) if tensors.exponent.size else 0
        width = int(tensors.exponent.max()) - self._first + 1 if tensors.exponent.size else 0
        self._place = (tensors.row, tensors.exponent - self._first)
        self._shape = (tensors.rows, width)
        self.counts = self._table(tensors.count)
        self._numel = np.maximum(numel, self.counts.sum(1))
        self._zeros = self._numel - self.counts.sum(1)

    def _table(self, of_bins: FloatArray) -> FloatArray:
        table = np.zeros(self._shape)
        table[self._place] = of_bins
        return table

    def sums(self, table: FloatArray) -> FloatArray:
        """Returns the sum over the bins of each tensor."""
        found: FloatArray = table.sum(1)
        return found

    def _up_to(self, octaves: int) -> FloatArray:
        """Returns for each bin the share of elements that lie less than so many octaves above it."""
        total = np.cumsum(self.counts, 1) + self._zeros[:, None]
        shifted = np.empty(self._shape)
        end = max(self._shape[1] - octaves + 1, 0)
        shifted[:, :end] = total[:, octaves - 1 :]
        shifted[:, end:] = self._numel[:, None]
        found: FloatArray = np.minimum(shifted / self._numel[:, None], 1.0)
        return found

    def beside(self, octaves: int) -> FloatArray:
        """Returns how many values of each bin to expect in a block with one that lies so many octaves above or more."""
        found: FloatArray = self.counts * (1.0 - self._up_to(octaves) ** (BLOCK - 1))
        return found

    @property
    def alone(self) -> FloatArray:
        """The chance of a value in each bin to have none above its bin in its block."""
        found: FloatArray = self._up_to(1) ** (BLOCK - 1)
        return found

    def above(self, factor: float) -> FloatArray:
        """Returns how many values of each bin are more than so many times its least magnitude."""
        return self._table(self._tensors.above_in_bins(factor))

    def most_beside(self, octaves: int) -> FloatArray:
        """Returns the most that `beside` may be, in whatever order values lie.

        Then each of the largest values leads a block, and the smallest fill these blocks.
        """
        least = np.ceil(self._numel / BLOCK)[:, None]
        larger = np.cumsum(self.counts[:, ::-1], 1)[:, ::-1]  # of each bin, itself and all above
        blocks = np.zeros(self._shape)
        blocks[:, : max(self._shape[1] - octaves, 0)] = np.minimum(larger, least)[:, octaves:]
        found, taken = np.zeros(self._shape), np.zeros(self._shape[0])
        for column in range(self._shape[1] - 1, -1, -1):
            room = (BLOCK - 1) * blocks[:, column] - taken
            found[:, column] = np.clip(room, 0.0, self.counts[:, column])
            taken += found[:, column]
        return found

    @property
    def mean(self) -> FloatArray:
        """The mean magnitude in each bin; zero in an empty one."""
        filled = self.counts > 0
        found: FloatArray = np.divide(
            self._table(self._tensors.bin_mass), self.counts, where=filled, out=np.zeros(self._shape)
        )
        return found


#: Ops that a format of 8 bits is for; they are given what other modules made.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "mv", "addmv", "convolution_backward"})
_VALUES = frozenset({Phase.FORWARD, Phase.RECOMPUTE})


@dataclass(frozen=True)
class Members:
    """Says which tensor belongs to which module; one may belong to several."""

    modules: tuple[str, ...]
    types: tuple[str, ...]  #: class names
    tensor: IntArray  #: its place among `Measured.rows`
    module: IntArray
    is_gradient: BoolArray


def members(run: Run, rank: int, measured: Measured, sites: Mapping[int, SiteRow]) -> Members:
    """The members of all modules, in the order in which these first ran.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    own = [(place, row.site.module, row.is_gradient) for place, row in enumerate(measured.rows) if _is_own(row, sites)]
    given = _given(run, rank, measured.rows, sites)
    pairs = dict.fromkeys([*own, *given])
    names = tuple(
        dict.fromkeys(module for _, module, _ in sorted(pairs, key=lambda one: _order(measured.rows[one[0]])))
    )
    numbers = {name: number for number, name in enumerate(names)}
    types = {site.module: site.module_type for site in sites.values() if site.module_type}
    return Members(
        modules=names,
        types=tuple(types.get(name, "") for name in names),
        tensor=np.array([place for place, _, _ in pairs], np.int64),
        module=np.array([numbers[module] for _, module, _ in pairs], np.int64),
        is_gradient=np.array([gradient for _, _, gradient in pairs], np.bool_),
    )


def _order(row: MeasuredRow) -> tuple[bool, int]:
    return row.site.op in frozenset(Node), row.seq


def _is_own(row: MeasuredRow, sites: Mapping[int, SiteRow]) -> bool:
    """Whether a tensor is one of the module's; casts have the values of what they are given.

    What backward makes of the loss is the loss's, as the scaled one itself is: no module runs it, and autocast leaves
    it in float32 whatever the modules run in.
    """
    if row.site.op in frozenset(Node):
        return row.site.op in (Node.PARAMETER, Node.GRADIENT)
    if row.site.cast != Cast.NONE or row.site.phase not in (*_VALUES, Phase.BACKWARD):
        return False
    forward = sites.get(row.site.forward_site) if row.site.forward_site is not None else None
    return forward is None or forward.phase != Phase.LOSS


def _given(
    run: Run, rank: int, rows: Sequence[MeasuredRow], sites: Mapping[int, SiteRow]
) -> Iterator[tuple[int, str, bool]]:
    """The operands of products: of forward all, of backward the gradients among them."""
    places = {(row.execution.step, row.execution.source, row.seq, row.out): n for n, row in enumerate(rows)}
    products = [number for number, site in sites.items() if op_name(site.op) in _PRODUCTS]
    steps = sorted({row.execution.step for row in rows})
    if not products or not steps:
        return
    ops = run.table(Table.OPS, step=steps, rank=rank).filter(nw.col("site").is_in(products))
    edges = run.table(Table.EDGES, step=steps, rank=rank)
    keys = ["step", "source", "seq"]
    joined = edges.select(*keys, "from_seq", "from_out").join(ops.select(*keys, "site").unique(), on=keys, how="inner")
    for edge in collect(joined):
        place = places.get((edge["step"], edge["source"], edge["from_seq"], edge["from_out"]))
        if place is None:
            continue
        consumer, gradient = sites[edge["site"]], rows[place].is_gradient
        if gradient == (consumer.phase == Phase.BACKWARD):
            yield place, consumer.module, gradient


#: A module fits a format if at most this share of its values is flushed to zero, which beside the others are tiny,
MOST_FLUSHED = 0.05
#: this share of its gradients' mass, or of what is past the largest number of a format with a scale for each tensor;
#: there it becomes that number. In an MX block that happens to the largest by design, and costs it an eighth at most;
MOST_LOST = 0.01
#: and at most this share is subnormal, with fewer bits.
MOST_SUBNORMAL = 0.1
#: From this exponent on, finite values beside an infinite one say that it was an overflow, and no mask.
_NEAR_TOP = 12
#: What a module has before anything is computed.
_WEIGHTS = frozenset({Node.PARAMETER, Node.BUFFER})


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatLoss:
    """Describes a module's losses in a format, as shares of all values and of the mass of gradients.

    A share is null where it was not measured. The class has many attributes because it is all that any view shows of a
    module in a format, and the JSON of it.
    """

    overflow_share: float | None = None
    lost_share: float | None = None  #: flushed to zero
    subnormal_share: float | None = None  #: kept with fewer bits
    gradient_overflow_share: float | None = None
    gradient_lost_share: float | None = None
    gradient_subnormal_share: float | None = None
    lost_at_most: float | None = None  #: of an MX format, where `lost_share` is an estimate
    fits: bool | None = None  #: null where nothing of the module was measured and finite, or its weights alone
    why: str = ""  #: of one that does not fit, which share is too large
    decides: str = ""  #: the share nearest to what is too large, or farthest past it; empty where all are zero


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """One module in each format."""

    module: str
    module_type: str
    tensors: int  #: measured, gradients not among them
    gradients: int  #: measured
    overflowed: bool  #: values of it overflowed in float16 as the run was
    formats: Mapping[str, FormatLoss]


@dataclass(frozen=True)
class InFormat:
    """Describes what becomes of each measured row in a format; zeros where all of the row is zero."""

    counts: Fate
    masses: Fate


def module_plans(measured: Measured, of: Members, fates: Mapping[str, InFormat]) -> tuple[ModulePlan, ...]:
    """The plan of each module.

    Args:
        measured: The tensors.
        of: Which module holds which.
        fates: By format, what becomes of each tensor.
    """
    sums = _Sums(measured, of)
    overflowed = sums.values(_overflowed(measured)) > 0
    computed = sums.values(_computed(measured)) > 0
    tensors, gradients = (sums.counted(gradient=gradient) for gradient in (False, True))
    losses = {name: _losses(fate, sums, name) for name, fate in fates.items()}
    return tuple(
        ModulePlan(
            module=name,
            module_type=of.types[number],
            tensors=int(tensors[number]),
            gradients=int(gradients[number]),
            overflowed=bool(overflowed[number]),
            formats={
                each: _known(
                    _judged(shares[number], each, overflowed=bool(overflowed[number])), computed=bool(computed[number])
                )
                for each, shares in losses.items()
            },
        )
        for number, name in enumerate(of.modules)
    )


def _overflowed(measured: Measured) -> FloatArray:
    """Returns how many values of each row overflowed in float16 as the run was."""

    def count(row: MeasuredRow) -> int:
        near = row.dtype == "float16" and row.largest >= 2.0**_NEAR_TOP
        return row.infinite if near and not row.nan and not row.is_gradient else 0

    return np.array([count(row) for row in measured.rows], np.float64)


def _computed(measured: Measured) -> FloatArray:
    """Returns for each row whether it was computed from a batch: a weight was not, and a cast may be of one."""
    weights = [row.site.op in _WEIGHTS or row.site.cast != Cast.NONE for row in measured.rows]
    return np.array([not each for each in weights], np.float64)


class _Sums:
    """Sums of what is known of each row over the members of each module."""

    def __init__(self, measured: Measured, of: Members) -> None:
        self._of, self._count = of, len(of.modules)
        self.elements = self.values(np.array([row.numel for row in measured.rows], np.float64))
        masses = np.zeros(len(measured.rows))
        shown = [place for place, number in enumerate(measured.number) if number is not None]
        masses[shown] = measured.exponents.mass
        # a step's gradient may be scaled, another's not: each counts by its own mass, without the scale
        self._unscaled = np.array([1.0 / row.loss_scale for row in measured.rows], np.float64)
        self.mass = self.gradients(masses)

    def values(self, of_rows: FloatArray) -> FloatArray:
        """Over what is no gradient."""
        return self._over(of_rows, ~self._of.is_gradient)

    def gradients(self, of_rows: FloatArray) -> FloatArray:
        """Over gradients, without their loss scale."""
        return self._over(of_rows * self._unscaled, self._of.is_gradient)

    def counted(self, *, gradient: bool) -> FloatArray:
        """How many tensors were measured."""
        return self._over(np.ones(self._unscaled.size), self._of.is_gradient == gradient)

    def _over(self, of_rows: FloatArray, chosen: BoolArray) -> FloatArray:
        modules, tensors = self._of.module[chosen], self._of.tensor[chosen]
        return np.bincount(modules, of_rows[tensors], self._count).astype(np.float64, copy=False)


def _losses(fate: InFormat, sums: _Sums, name: str) -> list[FormatLoss]:
    """Returns the shares that each module loses; not judged yet."""
    of_values = [sums.values(each) for each in (fate.counts.overflow, fate.counts.lost, fate.counts.subnormal)]
    of_mass = [sums.gradients(each) for each in (fate.masses.overflow, fate.masses.lost, fate.masses.subnormal)]
    most = sums.values(fate.counts.most_lost)
    found = []
    for number, (elements, mass) in enumerate(zip(sums.elements, sums.mass, strict=True)):
        overflow, lost, subnormal = (_share(each[number], elements) for each in of_values)
        gradient_overflow, gradient_lost, gradient_subnormal = (_share(each[number], mass) for each in of_mass)
        found.append(
            FormatLoss(
                overflow_share=overflow,
                lost_share=lost,
                subnormal_share=subnormal,
                gradient_overflow_share=gradient_overflow,
                gradient_lost_share=gradient_lost,
                gradient_subnormal_share=gradient_subnormal,
                lost_at_most=_share(most[number], elements) if name in MX else None,
            )
        )
    return found


def _share(part: float, whole: float) -> float | None:
    return min(1.0, float(part / whole)) if whole > 0 else None


def _judged(loss: FormatLoss, name: str, *, overflowed: bool) -> FormatLoss:
    """With whether the module fits the format, and why not."""
    if loss.overflow_share is None:
        return loss
    if overflowed and name == "float16":
        return replace(loss, fits=False, why="overflow_share", decides="overflow_share")
    past = 1.0 if name in MX else MOST_LOST if name in SCALED else 0.0
    limits = {
        "overflow_share": past,
        "gradient_overflow_share": past,
        "lost_share": MOST_FLUSHED,
        "gradient_lost_share": MOST_LOST,
        "subnormal_share": MOST_SUBNORMAL,
        "gradient_subnormal_share": MOST_SUBNORMAL,
    }
    shares = {field: getattr(loss, field) or 0.0 for field in limits}
    decides = max((field for field in limits if shares[field]), key=_nearness(shares, limits), default="")
    above = [field for field, most in limits.items() if shares[field] > most]
    why = max(above, key=_nearness(shares, limits), default="")
    return replace(loss, fits=not above, why=why, decides=why or decides)


def _known(loss: FormatLoss, *, computed: bool) -> FormatLoss:
    """Without what weights alone say of a module: that they do not fit a format, but never that the module does."""
    if computed or loss.fits is False:
        return loss
    return replace(
        loss, overflow_share=None, lost_share=None, subnormal_share=None, lost_at_most=None, fits=None, decides=""
    )


def _nearness(shares: Mapping[str, float], limits: Mapping[str, float]) -> Callable[[str], float]:
    """How many times what is allowed for a share is; where nothing is, of what is of others."""
    return lambda field: shares[field] / (limits[field] or MOST_LOST)
