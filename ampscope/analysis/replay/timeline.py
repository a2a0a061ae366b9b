"""A recording is drawn as what each op is, how close it came to its limit, and which op of another run is beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ampscope.analysis.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.replay.op_detail import OpKind, marked
from ampscope.analysis.replay.pairing import pair_ops
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.rounding import ran_in
from ampscope.trace.schema import Phase, SiteRow

#: From this many doublings between their largest magnitudes on, two results are told apart by their size.
FAR_BITS = 1.0


class OpDifference(IntEnum):
    """How an op's result differs from its counterpart's, the least first."""

    NONE = 0  #: the same bounds to the last digit
    DIGITS = 1  #: other values of about the same size
    SIZE = 2  #: largest magnitudes `FAR_BITS` doublings or more apart
    KIND = 3  #: neither is finite, and the one's are other infinities, or NaN, than the other's
    FINITE = 4  #: one is finite, the other is not
    ALONE = 5  #: the other step has no such op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lockstep:
    """One recording against another; arrays have an element for each op of the one."""

    partner: IntArray  #: position in the other recording; -1 where it has none
    difference: npt.NDArray[np.int8]  #: `OpDifference`
    first: int | None  #: position of the first op, casts apart, whose values differ at all
    notable: IntArray  #: positions where the difference is of `OpDifference.SIZE` or more and did not begin earlier
    largest: FloatArray  #: the counterpart's largest magnitude, an exponent of 2; NaN where not known
    nonfinite: BoolArray  #: something in the counterpart is not finite that nobody wanted so
    only_other: int  #: ops that the other alone has

    def of(self, position: int) -> OpDifference:
        """How the op at ``position`` differs."""
        return OpDifference(int(self.difference[position]))


def lockstep(one: Recording, other: Recording) -> Lockstep:
    """Compares the ops of ``one`` with their counterparts in ``other``."""
    partner = pair_ops(one, other).theirs
    difference = _differences(one, other, partner)
    told = ~one.cast & ~one.entry
    differing = np.flatnonzero((difference > OpDifference.NONE) & (difference < OpDifference.ALONE) & told)
    large = (difference >= OpDifference.SIZE) & told & ~((partner < 0) & one.sink)
    begins = large & ~np.append(False, large[:-1] & (difference[:-1] == difference[1:]))
    return Lockstep(
        partner=partner,
        difference=difference,
        first=int(differing[0]) if len(differing) else None,
        notable=np.flatnonzero(begins),
        largest=_of_counterparts(other.largest, partner, np.nan),
        nonfinite=_of_counterparts(other.alarming, partner, 0) > 0,
        only_other=len(other) - int((partner >= 0).sum()),
    )


def _of_counterparts(values: FloatArray | BoolArray, partner: IntArray, otherwise: float) -> FloatArray:
    found = np.full(len(partner), otherwise)
    found[partner >= 0] = values[partner[partner >= 0]]
    return found


def _differences(one: Recording, other: Recording, partner: IntArray) -> npt.NDArray[np.int8]:
    alone = partner < 0
    there = np.where(alone, 0, partner)
    found = np.zeros(len(one), np.int8)
    if len(other):
        found[_unequal(one, other, there)] = OpDifference.DIGITS
        with np.errstate(invalid="ignore"):
            found[np.abs(one.largest - other.largest[there]) >= FAR_BITS] = OpDifference.SIZE
        found[(found > OpDifference.NONE) & one.nonfinite & other.nonfinite[there]] = OpDifference.KIND
        told = _measured(one) & _measured(other)[there]
        found[(one.nonfinite != other.nonfinite[there]) & told] = OpDifference.FINITE
    found[alone] = OpDifference.ALONE
    return found


def _unequal(one: Recording, other: Recording, there: IntArray) -> BoolArray:
    """Returns a mask of the ops whose first outputs' bounds, both measured, differ; NaN equals NaN alone."""
    unequal = np.zeros(len(one), np.bool_)
    for name in ("min", "max"):
        (mine, known), (theirs, also_known) = _bound(one, name), _bound(other, name)
        theirs, also_known = theirs[there], also_known[there]
        unequal |= (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs)) & known & also_known
    return unequal


def _measured(seen: Recording) -> BoolArray:
    """Returns a mask of the ops of which it is known whether their results were finite."""
    return _bound(seen, "min")[1] | seen.nonfinite


def _bound(seen: Recording, name: str) -> tuple[FloatArray, BoolArray]:
    """A bound of each op's first output, and where it was measured."""
    first = seen.first_output[:-1]
    return seen.outputs.floats(name)[first], seen.outputs.known(name)[first]


T = TypeVar("T", str, tuple[str, str])


class OpMark(IntFlag):
    """Marks the properties of an op that are shown."""

    BAD = 1  #: something is not finite that nobody wanted so
    BORN = 2  #: that begins here
    INTENDED = 4  #: not finite because the code wants it so
    NEAR = 8  #: close to its limit
    CAST = 16  #: it only converts
    PARTS = 32  #: another step's result is of another size here, and was not before
    OTHER_BAD = 64  #: the other step's result is not finite, and nobody wanted it so


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStretch:
    """Neighbouring ops with something in common; positions, the last one within."""

    first: int
    last: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Holds the stretches in which modules ran, by depth, then by position. Arrays have one length."""

    first: IntArray  #: positions
    last: IntArray  #: the last one within
    depth: IntArray  #: 0 for a module in no other
    module: IntArray  #: index into `Timeline.modules`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """A step from its first op to its last. Arrays but those in ``spans`` have an element for each op.

    Distances are in bits, that is in doublings; NaN where not known. It has many attributes because each is one column
    of the picture.
    """

    seq: IntArray  #: sequence numbers, ascending
    ops: tuple[tuple[str, str], ...]  #: op, and the name of an input or parameter within its module; each once
    op: IntArray  #: index into `ops`
    modules: tuple[str, ...]  #: every module and those around it
    module: IntArray  #: index into `modules`; -1 outside of all
    dtypes: tuple[str, ...]  #: that were computed in
    dtype: IntArray  #: index into `dtypes`; -1 for none
    headroom: FloatArray  #: left before the dtype overflows
    spread: FloatArray  #: from the smallest magnitude to the largest
    marks: IntArray  #: sums of `OpMark`
    forward: IntArray  #: position of the op of forward that one of backward belongs to; -1 for none
    spans: Spans
    phases: tuple[OpStretch, ...]
    other: FloatArray | None  #: what this op's dtype would leave of headroom for the other step's result
    parted: int | None  #: the first op whose values are not those of the other step

    @property
    def depth(self) -> int:
        """How many modules lie in each other at most."""
        return int(self.spans.depth.max()) + 1 if len(self.spans.depth) else 0


def timeline(seen: Recording, against: Lockstep | None = None) -> Timeline:
    """The timeline of ``seen``, with that of the step that it is compared with laid over it."""
    ops, op = _numbered([_named(row) for row in seen.sites], seen.site)
    names = list(dict.fromkeys(ancestor for name in seen.modules for ancestor in _ancestry(name)))
    index = {name: place for place, name in enumerate(names)}
    computed, dtype = _numbered([ran_in(row) for row in seen.sites], seen.site)
    dtypes = tuple(filter(None, computed))
    own = np.array([index.get(name, -1) for name in seen.modules], np.int64)
    known = np.array([dtypes.index(name) if name else -1 for name in computed], np.int64)
    return Timeline(
        seq=seen.seq,
        ops=ops,
        op=op,
        modules=tuple(names),
        module=own[seen.module] if len(seen) else seen.module,
        dtypes=dtypes,
        dtype=known[dtype] if len(seen) else dtype,
        headroom=seen.headroom,
        spread=seen.largest - seen.smallest,
        marks=_marks(seen, against),
        forward=seen.forward,
        spans=_spans(seen, index),
        phases=tuple(_phases(seen)),
        other=None if against is None else seen.limit - against.largest,
        parted=None if against is None else against.first,
    )


def _named(row: SiteRow) -> tuple[str, str]:
    return row.op, row.name.removeprefix(f"{row.module}.") if row.module else row.name


def _numbered(of_site: Sequence[T], site: IntArray) -> tuple[tuple[T, ...], IntArray]:
    """Returns the sites' values, each once, and for each op the index of its own."""
    once = tuple(dict.fromkeys(of_site))
    index = {one: place for place, one in enumerate(once)}
    numbers = np.array([index[one] for one in of_site], np.int64)
    return once, numbers[site] if len(site) else np.empty(0, np.int64)


def _marks(seen: Recording, against: Lockstep | None) -> IntArray:
    flags = {OpMark.BAD: seen.alarming, OpMark.INTENDED: seen.intended}
    found = sum((np.where(holds, int(mark), 0) for mark, holds in flags.items()), np.zeros(len(seen), np.int64))
    places = {OpMark.BORN: OpKind.NONFINITE, OpMark.NEAR: OpKind.NEAR, OpMark.CAST: OpKind.CAST}
    for mark, kind in places.items():
        found[marked(seen, kind)] |= int(mark)
    if against is not None:
        found[against.notable] |= int(OpMark.PARTS)
        found[against.nonfinite] |= int(OpMark.OTHER_BAD)
    return found


def _ancestry(module: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c``; of what runs outside every module nothing."""
    parts = module.split(".") if module else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def _spans(seen: Recording, index: dict[str, int]) -> Spans:
    lines = [[index[name] for name in _ancestry(module)] for module in seen.modules]
    found: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for depth in range(max(map(len, lines), default=0)):
        at = np.array([line[depth] if depth < len(line) else -1 for line in lines], np.int64)[seen.module]
        first = _begins(at)
        last = np.append(first[1:], len(at)) - 1
        held = at[first] >= 0
        found.append((first[held], last[held], np.full(int(held.sum()), depth), at[first[held]]))
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)] or [np.empty(0, np.int64)] * 4
    return Spans(first=columns[0], last=columns[1], depth=columns[2], module=columns[3])


def _phases(seen: Recording) -> Iterator[OpStretch]:
    """Forward and backward by turns; what stands at the end of the step belongs to what ran before it."""
    names = np.array([_phase_word(site.phase) for site in seen.sites], dtype=object)
    words = names[seen.site] if len(seen) else np.empty(0, object)
    told = np.flatnonzero(words != "")
    starts = told[_begins(words[told])]
    stops = np.append(starts[1:], len(seen))[: len(starts)]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        yield OpStretch(first=start, last=stop - 1, name=str(words[start]))


def _phase_word(phase: str) -> str:
    if phase in (Phase.FORWARD, Phase.LOSS):
        return "forward"
    return "backward" if phase in (Phase.BACKWARD, Phase.RECOMPUTE) else phase


def _begins(values: npt.NDArray[np.generic]) -> IntArray:
    """The index of the first of each run of equal values."""
    changed = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.append(np.zeros(min(len(values), 1), np.int64), changed).astype(np.int64)
