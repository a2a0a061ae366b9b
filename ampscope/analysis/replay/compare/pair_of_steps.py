"""Two traced steps have their ops paired: numbers and program points by position, and what of a point is another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ampscope.analysis.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.op_facts import numel
from ampscope.analysis.replay.compare.compare_results import DifferenceKind
from ampscope.analysis.replay.pairing import OpPairs, pair_ops, producers
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.rounding import plain, ran_in
from ampscope.numerals import number
from ampscope.trace.schema import Cast, Node, SiteRow
from ampscope.trace.schema.tables import details

#: What becomes of the sums of two operands, or of a norm, is measured by what went in: it may cancel.
_ADDING = frozenset(
    {"add", "add_", "sub", "sub_", "rsub", "sum", "mean", "cumsum", "baddbmm", "native_layer_norm_backward"}
)
#: By which power of n the rounding of a sum's n terms grows: they are rounded each for itself.
_GROWTH = {"add": 0.0, "add_": 0.0, "sub": 0.0, "sub_": 0.0, "rsub": 0.0, "sum": 0.5, "mean": -0.5}
#: A convolution's bias: its gradient is this output, the sum of the first operand.
_CONVOLUTION, _BIAS = "convolution_backward", 2
#: A sum this much smaller than its terms has cancelled, as a random one does not; and what is believed of it at most.
_CANCELLED, _MOST_CANCELLED = 8.0, 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPair:
    """Two recordings, op by op; arrays have an element for each op of ``one``."""

    one: Recording
    other: Recording
    pairs: OpPairs
    writers: list[list[int]]  #: of each op of `one` the positions of what wrote its operands
    other_writers: list[list[int]]
    error: FloatArray  #: how far results are apart, as a share of their magnitude; NaN where that is not known
    cancelled: list[list[float]]  #: of each operand, how much smaller than its terms the sum is that it is; else 1
    same_bits: BoolArray  #: the same in all that was measured of both; False without a counterpart
    given_apart: BoolArray  #: of what came in and of random numbers: the checksums differ

    def are_near(self, here: int, there: int, share: float) -> bool:
        """Whether the first outputs of two ops, counterparts or not, have the same finite extremes but for rounding."""
        mine, theirs = (_extremes(seen, at) for seen, at in ((self.one, here), (self.other, there)))
        scale = max(map(abs, (*mine, *theirs)))
        return math.isfinite(scale) and all(abs(a - b) <= share * scale for a, b in zip(mine, theirs, strict=True))

    def unlike(self, here: int, there: int) -> tuple[float, ...]:
        """The first extremes of two ops of which one alone is finite, or both are not and differ; empty without."""
        for seen, at in ((self.one, here), (self.other, there)):
            row = seen.outputs.row(int(seen.first_output[at]))
            if row["min"] is None or row["max"] is None:
                return ()
        (low, high), (other_low, other_high) = _extremes(self.one, here), _extremes(self.other, there)
        for mine, theirs in ((low, other_low), (high, other_high)):
            both_nan = math.isnan(mine) and math.isnan(theirs)
            if mine != theirs and not both_nan and not (math.isfinite(mine) and math.isfinite(theirs)):
                return _told(mine, low, high), _told(theirs, other_low, other_high)
        return ()


def _told(end: float, low: float, high: float) -> float:
    """An end that is not finite, or the one that is larger."""
    return max((low, high), key=abs) if math.isfinite(low) and math.isfinite(high) else end


def pair_of(one: Recording, other: Recording) -> StepPair:
    """Pair two steps."""
    pairs = pair_ops(one, other)
    writers, other_writers = producers(one), producers(other)
    rows = _Rows(one, other, pairs)
    error, same, given = rows.compared(_operand_magnitudes(one, other, pairs))
    cancelled = np.ones(len(one.outputs))
    cancelled[rows.mine] = rows.cancelled
    return StepPair(
        one=one,
        other=other,
        pairs=pairs,
        writers=writers,
        other_writers=other_writers,
        error=error,
        cancelled=_by_operand(one, cancelled),
        same_bits=same,
        given_apart=given,
    )


def _by_operand(seen: Recording, values: FloatArray) -> list[list[float]]:
    """Gives for each op the values of its operands' rows, by argument; 1 where a row is missing."""
    writer = np.searchsorted(seen.seq, seen.edges.ints("from_seq"))
    row = seen.first_output[writer] + seen.edges.ints("from_out")
    known = row < seen.first_output[writer + 1]
    found = np.append(values, 1.0)[np.where(known, row, -1)].tolist()
    return [found[start:stop] for start, stop in pairwise(seen.first_edge.tolist())]


def _extremes(seen: Recording, at: int) -> tuple[float, float]:
    values = seen.outputs.row(int(seen.first_output[at]))
    low, high = (math.nan if values[name] is None else float(values[name]) for name in ("min", "max"))
    return low, high


class _Rows:
    """The outputs of paired ops, row by row.

    Args:
        one: A recording.
        other: Another one.
        pairs: Their ops.
    """

    def __init__(self, one: Recording, other: Recording, pairs: OpPairs) -> None:
        self.one, self.other = one, other
        self.count = len(one)
        self.paired = np.flatnonzero(pairs.theirs >= 0)
        theirs = pairs.theirs[self.paired]
        mine_first, mine_outs = one.first_output[:-1][self.paired], np.diff(one.first_output)[self.paired]
        other_first, other_outs = other.first_output[:-1][theirs], np.diff(other.first_output)[theirs]
        self.as_many = mine_outs == other_outs
        outs = np.minimum(mine_outs, other_outs)
        self.owner = np.repeat(np.arange(len(self.paired)), outs)
        within = np.arange(len(self.owner)) - np.repeat(np.cumsum(outs) - outs, outs)
        self.mine = mine_first[self.owner] + within
        self.theirs = other_first[self.owner] + within
        self.out = within
        self.cancelled = np.ones(len(self.owner))

    def compared(self, operands: FloatArray) -> tuple[FloatArray, BoolArray, BoolArray]:
        """Error, sameness and whether what was given differs, of each op of the one."""
        error, same = self._errors(operands)
        sums, told = self._sums()
        sized = self._values("numel")
        same &= np.equal(*sized) & ~(told & sums)
        error[np.not_equal(*sized)] = np.nan
        joined = np.full(self.count, np.nan)
        worst = np.full(len(self.paired), np.nan)
        np.fmax.at(worst, self.owner, error)
        joined[self.paired] = worst
        return joined, self._all(same) & self._whole(self.as_many), self._any(told & sums)

    def _errors(self, operands: FloatArray) -> tuple[FloatArray, BoolArray]:
        error, same = np.full(len(self.owner), np.nan), np.ones(len(self.owner), np.bool_)
        low, high, most = (self._values(name) for name in ("min", "max", "max_finite"))
        scale = np.fmax(_magnitude(low), _magnitude(high))
        scale = self._entered(scale, operands[self.paired][self.owner])
        for name, (mine, theirs) in (("min", low), ("max", high), ("max_finite", most)):
            known = self._known(name)
            apart = _apart(mine, theirs, scale)
            error = np.where(known, np.fmax(error, apart), error)
            same &= ~known | (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        for name in ("nan", "posinf", "neginf", "zeros"):
            mine, theirs = self._values(name)
            same &= ~self._known(name) | (mine == theirs)
        return error, same

    def _entered(self, own: FloatArray, operands: FloatArray) -> FloatArray:
        """Rounding is measured by a result's own magnitude; in sums, by at least what their terms may bring."""
        site = self.one.site[self.paired][self.owner]
        names = [_name(each.op) for each in self.one.sites]
        adds = np.array([name in _ADDING for name in names], np.bool_)[site]
        growth = np.array([_GROWTH.get(name, np.nan) for name in names])[site]
        bias = np.array([name == _CONVOLUTION for name in names], np.bool_)[site] & (self.out == _BIAS)
        first = np.array([numel(each.in_shapes[0]) if each.in_shapes else 1 for each in self.one.sites])[site]
        terms = np.maximum(first / np.maximum(self.one.outputs.floats("numel")[self.mine], 1.0), 1.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            growth = np.where(bias, _GROWTH["sum"], growth)
            entered = np.where(np.isnan(growth), np.nan, operands * terms**growth)
            smaller = np.minimum(entered / own, _MOST_CANCELLED)
        self.cancelled = np.where(smaller > _CANCELLED, smaller, 1.0)
        scale = np.where((self.out > 0) | adds, np.fmax(own, operands), own)
        return np.fmax(scale, entered)

    def _sums(self) -> tuple[BoolArray, BoolArray]:
        """Returns masks of the rows whose checksums differ, and of those that have any.

        Checksums are whole numbers, which no float holds.
        """
        mine = np.ma.getdata(self.one.outputs.arrays["checksum"])[self.mine]
        theirs = np.ma.getdata(self.other.outputs.arrays["checksum"])[self.theirs]
        return np.not_equal(mine, theirs), self._known("checksum")

    def _values(self, name: str) -> tuple[FloatArray, FloatArray]:
        return self.one.outputs.floats(name)[self.mine], self.other.outputs.floats(name)[self.theirs]

    def _known(self, name: str) -> BoolArray:
        known: BoolArray = self.one.outputs.known(name)[self.mine] & self.other.outputs.known(name)[self.theirs]
        return known

    def _all(self, rows: BoolArray) -> BoolArray:
        return ~self._any(~rows) & self._whole(np.ones(len(self.paired), np.bool_))

    def _any(self, rows: BoolArray) -> BoolArray:
        found = np.zeros(self.count, np.bool_)
        found[self.paired[self.owner[rows]]] = True
        return found

    def _whole(self, paired: BoolArray) -> BoolArray:
        found = np.zeros(self.count, np.bool_)
        found[self.paired] = paired
        return found


def _operand_magnitudes(one: Recording, other: Recording, pairs: OpPairs) -> FloatArray:
    """The largest magnitude among an op's operands in either step; 0 where none is known.

    Of the backward of a convolution its first operand's, the gradient, of which the bias's is the sum.
    """
    mine, theirs = _read(one), _read(other)
    paired = pairs.theirs >= 0
    mine[paired] = np.fmax(mine[paired], theirs[pairs.theirs[paired]])
    return mine


def _read(seen: Recording) -> FloatArray:
    largest = np.zeros(len(seen))
    if len(seen.edges):
        reader: IntArray = np.searchsorted(seen.seq, seen.edges.ints("seq"))
        writer: IntArray = np.searchsorted(seen.seq, seen.edges.ints("from_seq"))
        bias_alone = np.array([_name(site.op) == _CONVOLUTION for site in seen.sites], np.bool_)
        of_sum = ~bias_alone[seen.site[reader]] | (seen.edges.ints("arg") == 0)
        np.fmax.at(largest, reader[of_sum], np.exp2(seen.largest[writer[of_sum]]))
    return largest


def _magnitude(bounds: tuple[FloatArray, FloatArray]) -> FloatArray:
    """The largest finite magnitude of both."""
    kept = [np.where(np.isfinite(each), np.abs(each), np.nan) for each in bounds]
    return np.fmax(*kept)


def _apart(mine: FloatArray, theirs: FloatArray, scale: FloatArray) -> FloatArray:
    """How far apart two bounds are; 0 for the same NaN or infinity, infinite where one is another kind of number."""
    same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
    both = np.isfinite(mine) & np.isfinite(theirs)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.abs(mine - theirs) / scale
    return np.where(same, 0.0, np.where(both, share, np.inf))


def _name(op: str) -> str:
    return op.partition(".")[2].partition(".")[0]


#: Arguments that follow from shapes and dtypes, and say nothing where these differ.
_OF_SHAPES = frozenset({"size", "sizes", "self_size", "input_sizes", "normalized_shape", "split_sizes", "repeats"})


_MULTIPLYING = frozenset({"mul", "mul_"})


class Renamed(NamedTuple):
    """One thing that is another: ``name`` is ``was`` in the first and ``now`` in the second."""

    kind: DifferenceKind
    name: str
    was: str
    now: str


def site_changes(one: SiteRow, other: SiteRow) -> tuple[Renamed, ...]:
    """Returns the changes between two program points, but for names of modules and the number of the line."""
    found = [*_scalars(one, other), *_dtype(one, other)]
    if not _same_shapes(one, other):
        found.append(Renamed(DifferenceKind.SHAPE, "shape", _shapes(one), _shapes(other)))
    if one.code and other.code and one.code != other.code:
        found.append(Renamed(DifferenceKind.LINE, "line", one.code, other.code))
    return tuple(found)


class Kinds:
    """Tells the kind of a difference.

    Args:
        pair: The steps.
        scales: Their loss scales.
    """

    def __init__(self, pair: StepPair, scales: tuple[float | None, float | None]) -> None:
        self.pair, self.scales = pair, scales
        self._of_scaler: tuple[set[int], set[int]] = set(), set()  #: positions in both of a scale that one alone has

    def alone(self, here: int, there: int) -> DifferenceKind:
        """Returns the kind of an op that only one step has, asked in order of execution."""
        side, at = (0, here) if here >= 0 else (1, there)
        seen = (self.pair.one, self.pair.other)[side]
        if self._scales(side, at):
            return DifferenceKind.SCALE
        return DifferenceKind.CAST if seen.site_of(at).cast != Cast.NONE else DifferenceKind.OP

    def _scales(self, side: int, at: int) -> bool:
        """Whether an op is a scaler's, and the other step has none: the scale, a copy of it, what it multiplies."""
        scale, other = self.scales[side], self.scales[1 - side]
        if scale is None or other is not None:
            return False
        known, writers = self._of_scaler[side], (self.pair.writers, self.pair.other_writers)[side][at]
        seen = (self.pair.one, self.pair.other)[side]
        if self._is_scale(side, at) if not writers else known.issuperset(writers):
            known.add(at)
            return True
        if not writers:  # its count of steps, which nothing in the step reads
            return bool(known) and bool(seen.first_reader[at] == seen.first_reader[at + 1])
        name = seen.site_of(at).op.partition(".")[2].partition(".")[0]
        return name in _MULTIPLYING and not known.isdisjoint(writers)

    def _is_scale(self, side: int, at: int) -> bool:
        """Whether what nothing wrote is a number as large as the scale, and nothing that the model holds."""
        seen, row = (self.pair.one, self.pair.other)[side], self._first(side, at)
        held = seen.entry[at] and seen.site_of(at).op != Node.INPUT
        one_element = int(seen.outputs.arrays["numel"][row]) == 1
        return not held and one_element and self._largest[side][row] == self.scales[side]

    def _first(self, side: int, at: int) -> int:
        return int((self.pair.one, self.pair.other)[side].first_output[at])

    def given(self, here: int, there: int) -> DifferenceKind:
        """Returns the kind of a value that came into the step."""
        site = self.pair.one.site_of(here)
        if site.op != Node.INPUT:
            return DifferenceKind.WEIGHTS
        scales = self.scales
        return (
            DifferenceKind.SCALE
            if scales[0] != scales[1] and self._values(here, there) == scales
            else DifferenceKind.BATCH
        )

    def changed(self, change: Renamed) -> DifferenceKind:
        """Returns the kind of a changed argument; the number that a scaler makes its first scale of is a scale."""
        mine, theirs = self.scales
        if change.kind is not DifferenceKind.SCALAR or mine is None or theirs is None or mine == theirs:
            return change.kind
        return (
            DifferenceKind.SCALE if (change.was, change.now) == (_word(mine), _word(theirs)) else DifferenceKind.SCALAR
        )

    def of_value(self, here: int, there: int, *, drawn: bool) -> DifferenceKind:
        """Returns the kind of a value that an op made; ``drawn`` values are random numbers."""
        if drawn:
            return DifferenceKind.RANDOM
        one, other = self.pair.one, self.pair.other
        return DifferenceKind.NONFINITE if one.nonfinite[here] != other.nonfinite[there] else DifferenceKind.VALUE

    def _values(self, here: int, there: int) -> tuple[float, float]:
        """The only element of both, where each has no other."""
        return self._largest[0][self._first(0, here)], self._largest[1][self._first(1, there)]

    @cached_property
    def _largest(self) -> tuple[list[float], list[float]]:
        one, other = self.pair.one.outputs.floats("max"), self.pair.other.outputs.floats("max")
        return one.tolist(), other.tolist()


def _scalars(one: SiteRow, other: SiteRow) -> list[Renamed]:
    if one.scalars == other.scalars:
        return []
    mine, theirs = details(one.scalars), details(other.scalars)
    shaped = _same_shapes(one, other)
    apart = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    told = [name for name in apart if "dtype" not in name and (shaped or not _is_of_shapes(name, mine, theirs))]
    return [Renamed(DifferenceKind.SCALAR, name, _word(mine.get(name)), _word(theirs.get(name))) for name in told]


def _is_of_shapes(name: str, mine: dict[str, object], theirs: dict[str, object]) -> bool:
    return name in _OF_SHAPES or any(isinstance(each.get(name), list) for each in (mine, theirs))


def _dtype(one: SiteRow, other: SiteRow) -> list[Renamed]:
    was, now = (plain(dtypes[0]) if dtypes else "" for dtypes in (one.out_dtypes, other.out_dtypes))
    computed = ran_in(one), ran_in(other)
    if computed[0] != computed[1] and all(computed):
        was, now = computed
    return [Renamed(DifferenceKind.DTYPE, "dtype", was, now)] if was != now else []


def _same_shapes(one: SiteRow, other: SiteRow) -> bool:
    return tuple(one.in_shapes) == tuple(other.in_shapes) and tuple(one.out_shapes) == tuple(other.out_shapes)


def _shapes(site: SiteRow) -> str:
    return ", ".join(shape or "a scalar" for shape in (site.in_shapes or site.out_shapes))


def _word(value: object) -> str:
    return "left out" if value is None else number(value) if isinstance(value, float) else str(value)
