"""One walk along the flow of values tells where two steps begin to differ, beyond rounding, from what follows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np

from ampscope.analysis.op_facts import numel
from ampscope.analysis.replay.compare.compare_results import DifferenceKind
from ampscope.analysis.replay.compare.pair_of_steps import Kinds, Renamed, StepPair, pair_of, site_changes
from ampscope.analysis.replay.compare.sides import Opened
from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.rounding import plain
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
    """Holds what is known of the two steps beforehand."""

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
    sizes = [numel(shape) for shape in site.in_shapes]
    result = max(numel(site.out_shapes[0]) if site.out_shapes else 1, 1)
    if name in _PRODUCTS and len(sizes) >= 2:
        first, second = sizes[-2:]
        return max(math.sqrt(first * second / result), 1.0)
    return max(max(sizes, default=1) / result, 1.0) if name in _SUMS else 1.0


class PointPairs:
    """Compares the program points of paired ops, each pair of points once.

    Args:
        pair: The steps.
        expected: What is known of them beforehand.
    """

    def __init__(self, pair: StepPair, expected: Expected) -> None:
        self.pair, self.expected = pair, expected
        self._changes: dict[tuple[int, int], tuple[Renamed, ...]] = {}
        self._rounding: dict[tuple[int, int], float] = {}

    def changes(self, here: int, there: int) -> tuple[Renamed, ...]:
        """Returns the changes between the program points of two ops."""
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


#: The same operands, in another order.
_ORDER = Renamed(DifferenceKind.OPERANDS, "order", "", "")
_OPERANDS = Renamed(DifferenceKind.OPERANDS, "operands", "", "")
#: How far apart in order of execution two ops may be that changed places.
_NEARBY = 4
#: Least and greatest element of a part, as texts, in which NaN is NaN; empty of the whole.
Part = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Root:
    """A difference that does not follow from another one."""

    kind: DifferenceKind
    here: int  #: position in the first; -1 for what only the second has
    there: int  #: position in the second; -1 for what only the first has
    order: float  #: position in the first, or between two
    change: Renamed | None = None


@dataclass(slots=True)
class Walked:
    """Holds the results of the walk."""

    roots: list[Root] = field(default_factory=list)
    followers: list[Root] = field(default_factory=list)  #: changed program points that follow from a root
    apart: list[int] = field(default_factory=list)  #: positions in the first whose error is beyond tolerance
    tolerance: dict[int, float] = field(default_factory=dict)  #: of these
    cause: list[int] = field(default_factory=list)  #: of each op of the first the number of a root, -1 for none
    widest: float = 0.0  #: the largest tolerance of any op, at the end of the longest way
    lines: list[Root] = field(default_factory=list)  #: the same op in another line of code


def walk(pair: StepPair, expected: Expected) -> Walked:
    """Tell roots from what follows from them."""
    return _Walk(pair, expected).found()


class _Walk:
    """The walk over one pair of steps.

    Args:
        pair: The steps.
        expected: What is known of them beforehand.
    """

    def __init__(self, pair: StepPair, expected: Expected) -> None:
        self.pair = pair
        self._points = PointPairs(pair, expected)
        self._kinds = Kinds(pair, expected.scales)
        self.theirs: list[int] = pair.pairs.theirs.tolist()
        self.mine: list[int] = pair.pairs.mine.tolist()
        self.error: list[float] = pair.error.tolist()
        self.same: list[bool] = pair.same_bits.tolist()
        self.given: list[bool] = pair.given_apart.tolist()
        self.spread = [0.0] * len(pair.one)  #: squares of the tolerances
        self._plain = [0.0] * len(pair.one)  #: the same, whatever cancels
        self.clean = [False] * len(pair.one)  #: the same to the last bit, with all that led to it
        self.result = Walked(cause=[-1] * len(pair.one))
        self._alone: dict[int, int] = {}  #: by position in the other, the first root of what it alone has there
        self._computed_alone: set[int] = set()
        self._waiting: deque[tuple[float, int]] = deque()  #: what the other alone has, by order
        self._other_spread: dict[int, float] = {}

    def found(self) -> Walked:
        """Walk over all ops in order of execution."""
        self._only_in_other()
        for here, there in enumerate(self.theirs):
            self._pass_on(here)
            if self.pair.one.sink[here] and (there < 0 or not self.pair.writers[here]):
                continue  # measured by turns, or after the optimizer, of whose ops there are none
            if there < 0:
                self._only_in_one(here)
            elif self.pair.one.entry[here]:
                self._entered(here, there)
            else:
                self._ran(here, there)
        self.result.widest = math.sqrt(max(self._plain, default=0.0))
        return self.result

    def _only_in_one(self, here: int) -> None:
        """Notes an op that only the first step has; of several in a row the first that computes is the cause."""
        site, writers = self.pair.one.site_of(here), self.pair.writers[here]
        kind = self._kinds.alone(here, -1)
        self.result.cause[here] = self._cause((each, -1) for each in writers)
        self._put(here, Root(kind, here, -1, here))
        self._spreads(here, [(each, -1) for each in writers], rounding(site, site))
        if self.pair.one.entry[here]:
            self.result.cause[here] = -1

    def _only_in_other(self) -> None:
        """Notes the ops that only the second step has, between those that both have."""
        order = -0.5
        for there, here in enumerate(self.mine):
            if here >= 0:
                order = max(order, here + 0.5)
            if here >= 0 or self.pair.other.sink[there]:
                continue
            self.result.roots.append(Root(self._kinds.alone(-1, there), -1, there, order))
            before = [self._alone[each] for each in self.pair.other_writers[there] if each in self._computed_alone]
            self._alone[there] = min([*before, len(self.result.roots) - 1])
            self._waiting.append((order, there))
            if not self.pair.other.entry[there]:
                self._computed_alone.add(there)

    def _pass_on(self, here: int) -> None:
        """Hands on the operands' tolerances of ops that only the second ran, before an op of the first."""
        while self._waiting and self._waiting[0][0] < here:
            there = self._waiting.popleft()[1]
            site, writers = self.pair.other.site_of(there), self.pair.other_writers[there]
            operands = [(self.mine[each], each) for each in writers]
            self._other_spread[there] = self._inherited(self.spread, operands) + rounding(site, site) ** 2

    def _spreads(self, here: int, operands: list[tuple[int, int]], local: float) -> None:
        """Notes how far an op's result may be apart: by its own rounding, and by that of its operands."""
        self.spread[here] = local**2 + self._inherited(self.spread, operands, self.pair.cancelled[here])
        self._plain[here] = local**2 + self._inherited(self._plain, operands)

    def _inherited(
        self, spread: list[float], operands: list[tuple[int, int]], cancelled: Iterable[float] = ()
    ) -> float:
        """The largest square of a tolerance among operands; none of what is the same to the last bit.

        What rounding has left of a sum that cancelled is all there is of it: as much as its terms were larger.
        """
        known = zip(operands, chain(cancelled, repeat(1.0)), strict=False)
        mine = (spread[each] * more**2 for (each, _), more in known if each >= 0 and not self.clean[each])
        theirs = (self._other_spread.get(each, 0.0) for _, each in operands if each >= 0)
        return max((*mine, *theirs), default=0.0)

    def _entered(self, here: int, there: int) -> None:
        changes = self._points.changes(here, there)
        mattering = [each for each in changes if each.kind is DifferenceKind.DTYPE]
        self.clean[here] = self.same[here] and not mattering
        if mattering:
            self._put(here, Root(DifferenceKind.DTYPE, here, there, here, mattering[0]))
            return
        if self.clean[here]:
            return
        error = self.error[here]
        limit = self._points.limit(here, there)
        self.spread[here] = self._plain[here] = max(limit, error if math.isfinite(error) else 0.0) ** 2
        kind = self._kinds.given(here, there)
        self._put(here, Root(kind, here, there, here))
        if error > limit or self._is_counted(here) or (limit == 0 and self.given[here]):
            self._apart(here, limit)

    def _ran(self, here: int, there: int) -> None:
        operands = self._operands(here, there)
        before = self._cause(operands)
        self.result.cause[here] = before
        for root in self._changed(here, there):
            self._put(here, root, after=before)
        local = self._points.limit(here, there)
        self._spreads(here, operands, local)
        limit = self._points.asked(math.sqrt(self.spread[here]))
        clean = all(mine >= 0 and self.clean[mine] for mine, _ in operands)
        self.clean[here] = clean and self.same[here] and self.result.cause[here] < 0
        same_dtype = all(each.kind is not DifferenceKind.DTYPE for each in self._points.changes(here, there))
        drawn = self.given[here] and before < 0 and same_dtype
        if self.error[here] > limit and self._may_be_exchanged(here) and _is_exchanged(self.pair, here, there, limit):
            self._put(here, Root(DifferenceKind.OPERANDS, here, there, here, _ORDER))
        elif self.error[here] > limit or drawn:
            if self.result.cause[here] < 0:
                self._put(here, Root(self._kinds.of_value(here, there, drawn=drawn), here, there, here))
            self._apart(here, limit)

    def _may_be_exchanged(self, here: int) -> bool:
        """Whether nothing, or another exchange, explains that an op differs."""
        cause = self.result.cause[here]
        return cause < 0 or self.result.roots[cause].change == _ORDER

    def _changed(self, here: int, there: int) -> Iterator[Root]:
        for change in self._points.changes(here, there):
            if change.kind is DifferenceKind.LINE:
                self.result.lines.append(Root(DifferenceKind.LINE, here, there, here, change))
            else:
                yield Root(self._kinds.changed(change), here, there, here, change)
        mine, theirs = self._sources(here, there)
        parts, other_parts = _parts(self.pair.one, here), _parts(self.pair.other, there)
        if len(mine) != len(theirs):
            yield Root(DifferenceKind.OPERANDS, here, there, here, _OPERANDS)
        elif any(self._is_another(*each) for each in zip(mine, theirs, parts, other_parts, strict=True)):
            known = sorted((self.theirs[a], part) for a, part in zip(mine, parts, strict=True))
            swapped = known == sorted(zip(theirs, other_parts, strict=True))
            yield Root(DifferenceKind.OPERANDS, here, there, here, _ORDER if swapped else _OPERANDS)

    def _sources(self, here: int, there: int) -> tuple[list[int], list[int]]:
        """Returns the writers of the operands of an op and of its counterpart, casts passed over."""
        one, other = self.pair.one, self.pair.other
        mine = [_source(each, one, self.pair.writers) for each in self.pair.writers[here]]
        return mine, [_source(each, other, self.pair.other_writers) for each in self.pair.other_writers[there]]

    def _is_another(self, mine: int, theirs: int, part: Part, other_part: Part) -> bool:
        """Whether two operands were not written by counterparts, or are other parts of the same."""
        if self.theirs[mine] < 0 or self.mine[theirs] < 0:
            return False
        return self.theirs[mine] != theirs or (self.clean[mine] and part != other_part)

    def _put(self, here: int, root: Root, *, after: int = -1) -> None:
        """Notes a root, or what follows from an earlier one of its kind."""
        if self._follows(root, after):
            self.result.followers.append(root)
            return
        self.result.roots.append(root)
        if self.result.cause[here] < 0:
            self.result.cause[here] = len(self.result.roots) - 1

    def _follows(self, root: Root, after: int) -> bool:
        """Whether a difference is what an earlier one makes of the op: its operands come in another dtype or shape."""
        if (
            root.here < 0
            or root.there < 0
            or root.kind not in (DifferenceKind.DTYPE, DifferenceKind.SHAPE, DifferenceKind.OPERANDS)
        ):
            return False
        one, other = self.pair.one.site_of(root.here), self.pair.other.site_of(root.there)
        if root.kind is DifferenceKind.DTYPE:
            return after >= 0 and one.autocast == other.autocast and tuple(one.in_dtypes) != tuple(other.in_dtypes)
        return after >= 0

    def _cause(self, operands: Iterable[tuple[int, int]]) -> int:
        """The earliest root behind an op's operands, in either step; -1 where there is none."""
        mine = (self.result.cause[each] for each, _ in operands if each >= 0)
        theirs = (self._alone.get(each, -1) for _, each in operands)
        causes = {each for each in (*mine, *theirs) if each >= 0}
        return min(causes, key=lambda each: (self.result.roots[each].order, each), default=-1)

    def _operands(self, here: int, there: int) -> list[tuple[int, int]]:
        """Pairs the writers of the operands of an op and of its counterpart; -1 beyond the shorter."""
        mine, theirs = self.pair.writers[here], self.pair.other_writers[there]
        size = max(len(mine), len(theirs))
        pad = [-1] * size
        return list(zip((mine + pad)[:size], (theirs + pad)[:size], strict=True))

    def _apart(self, here: int, limit: float) -> None:
        self.result.apart.append(here)
        self.result.tolerance[here] = limit

    def _is_counted(self, here: int) -> bool:
        """Whether what came in is whole numbers, of which no other will do; or another number of them."""
        if any(each.kind is DifferenceKind.SHAPE for each in self._points.changes(here, self.theirs[here])):
            return True
        return self.given[here] and not any("float" in each for each in self.pair.one.site_of(here).out_dtypes)


def _is_exchanged(pair: StepPair, here: int, there: int, limit: float) -> bool:
    """Whether an op nearby of the same kind gave what this one's counterpart did, and the other way round."""
    site = pair.one.site_of(here)
    for each in range(max(here - _NEARBY, 0), min(here + _NEARBY + 1, len(pair.one))):
        partner = int(pair.pairs.theirs[each])
        other = pair.one.site_of(each)
        alike = (other.op, other.module, other.phase) == (site.op, site.module, site.phase)
        if each == here or partner < 0 or not alike:
            continue
        if pair.are_near(here, partner, limit) and pair.are_near(each, there, limit):
            return True
    return False


def _parts(seen: Recording, at: int) -> list[Part]:
    """Returns the extremes of each operand that is a part of what was written; empty ones for whole operands."""
    rows = range(int(seen.first_edge[at]), int(seen.first_edge[at + 1]))
    partial, low, high = (seen.edges.arrays[name] for name in ("partial", "min", "max"))
    return [(str(low[row]), str(high[row])) if partial[row] else ("", "") for row in rows]


def _source(at: int, seen: Recording, writers: list[list[int]]) -> int:
    """Returns the op whose result an operand is a cast of."""
    while seen.cast[at] and writers[at]:
        at = writers[at][0]
    return at
