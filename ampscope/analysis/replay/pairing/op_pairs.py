"""Which op of one recording is which of another: by what they do and where, along the flow of values, not by number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, IntArray
from ampscope.analysis.replay.pairing.module_pairs import ModulePairs, pair_modules
from ampscope.analysis.replay.pairing.sequences import align
from ampscope.analysis.replay.recording import Recording
from ampscope.trace.schema import Phase, SiteRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpPairs:
    """Ops by position in their recordings."""

    theirs: IntArray  #: of each op of one the op of the other that is the same; -1 where there is none
    mine: IntArray  #: the other way round
    modules: ModulePairs


def producers(seen: Recording) -> list[list[int]]:
    """Of each op the positions of the ops that wrote its operands, by argument."""
    writers = np.searchsorted(seen.seq, seen.edges.ints("from_seq")).tolist()
    bounds = seen.first_edge.tolist()
    return [writers[start:stop] for start, stop in pairwise(bounds)]


def pair_ops(one: Recording, other: Recording) -> OpPairs:
    """Pair the ops of two steps.

    Ops are lined up in order of execution by module, phase and op: dtypes, shapes and lines may have changed. Casts and
    what comes from outside are paired from there, by who reads them and who wrote them, so that one step may have
    casts that the other lacks.
    """
    modules = pair_modules(one, other)
    pairing = _Pairing(one, other, modules)
    pairing.in_order()
    pairing.by_key(computing=True)
    pairing.between()
    pairing.along_the_flow()
    pairing.by_key(computing=False)
    return OpPairs(theirs=pairing.theirs, mine=pairing.mine, modules=modules)


class _Pairing:
    """Pairs as they are found."""

    def __init__(self, one: Recording, other: Recording, modules: ModulePairs) -> None:
        self.one, self.other, self.modules = one, other, modules
        self.theirs = np.full(len(one), -1, np.int64)
        self.mine = np.full(len(other), -1, np.int64)
        numbers: dict[Hashable, int] = {}
        names = _Names(modules)
        self.keys = _keys(one, numbers, names.there)
        self.other_keys = _keys(other, numbers, _itself)
        self.computing, self.other_computing = _computing(one), _computing(other)

    def in_order(self) -> None:
        """Ops that compute, by order."""
        here, there = np.flatnonzero(self.computing), np.flatnonzero(self.other_computing)
        found = align(self.keys[here], self.other_keys[there])
        self._put(here[found >= 0], there[found[found >= 0]])

    def by_key(self, *, computing: bool) -> None:
        """What is left, in whatever order: of ops that compute only what both have left as often."""
        here = np.flatnonzero((self.theirs < 0) & (self.computing == computing))
        there = np.flatnonzero((self.mine < 0) & (self.other_computing == computing))
        first, second = _matched(self.keys[here], self.other_keys[there], alike=computing)
        self._put(here[first], there[second])

    def between(self) -> None:
        """Ops left between the same two, whatever module of both steps they are counted to."""
        here = np.flatnonzero((self.theirs < 0) & self.computing & _is_of(self.one, self.modules.theirs.keys()))
        there = np.flatnonzero(
            (self.mine < 0) & self.other_computing & _is_of(self.other, self.modules.theirs.values())
        )
        numbers: dict[Hashable, int] = {}
        mine = _weak_keys(self.one, here, _before(self.theirs >= 0, here), numbers)
        behind = _before(self.mine >= 0, there)
        theirs = _weak_keys(self.other, there, np.where(behind >= 0, self.mine[behind], -1), numbers)
        first, second = _matched(mine, theirs, alike=True)
        self._put(here[first], there[second])

    def along_the_flow(self) -> None:
        """Casts and what came from outside: what gave paired ops the same operand; then casts of the same result."""
        mine, theirs = producers(self.one), producers(self.other)
        partner, back = self.theirs.tolist(), self.mine.tolist()
        walk = _Walk(_Side(self.one, mine, partner), _Side(self.other, theirs, back))
        for here, there in enumerate(list(partner)):
            if there >= 0 and len(mine[here]) == len(theirs[there]):
                for a, b in zip(mine[here], theirs[there], strict=True):
                    walk.up(a, b)
        walk.down()
        self.theirs, self.mine = np.array(partner, np.int64), np.array(back, np.int64)

    def _put(self, here: IntArray, there: IntArray) -> None:
        self.theirs[here] = there
        self.mine[there] = here


class _Side:
    """One of the recordings, as lists, which are faster to walk.

    Args:
        seen: The recording.
        writers: `producers`.
        partner: Of each op its counterpart so far, -1 for none; written to.
    """

    def __init__(self, seen: Recording, writers: list[list[int]], partner: list[int]) -> None:
        self.cast: list[bool] = (seen.cast & ~seen.entry).tolist()
        self.entry: list[bool] = seen.entry.tolist()
        self.op = [seen.sites[site].op for site in seen.site.tolist()]
        self.writers = writers
        self.partner = partner

    def before(self, at: int) -> int:
        """What a cast reads; -1 where that is not known."""
        return self.writers[at][0] if self.writers[at] else -1


class _Walk:
    """From ops that are paired to what is not."""

    def __init__(self, one: _Side, other: _Side) -> None:
        self.one, self.other = one, other

    def up(self, here: int, there: int) -> None:
        """Pairs what two ops read, and what these are casts of."""
        one, other = self.one, self.other
        while here >= 0 and there >= 0 and one.partner[here] < 0 and other.partner[there] < 0:
            if one.cast[here] != other.cast[there]:  # a cast that the other step lacks
                here, there = (one.before(here), there) if one.cast[here] else (here, other.before(there))
                continue
            if not one.cast[here]:
                if one.entry[here] and other.entry[there] and one.op[here] == other.op[there]:
                    self._pair(here, there)
                return
            self._pair(here, there)
            here, there = one.before(here), other.before(there)

    def down(self) -> None:
        """Pairs the casts of paired results that no paired op read."""
        casts: dict[int, list[int]] = {}
        for there, is_cast in enumerate(self.other.cast):
            if is_cast and self.other.partner[there] < 0:
                casts.setdefault(self.other.before(there), []).append(there)
        for here, is_cast in enumerate(self.one.cast):
            before = self.one.before(here) if is_cast and self.one.partner[here] < 0 else -1
            waiting = casts.get(self.one.partner[before] if before >= 0 else -1)
            if before >= 0 and waiting:
                self._pair(here, waiting.pop(0))

    def _pair(self, here: int, there: int) -> None:
        self.one.partner[here] = there
        self.other.partner[there] = here


class _Names:
    """What modules and parameters of one step are called in the other."""

    def __init__(self, modules: ModulePairs) -> None:
        self._theirs: Mapping[str, str] = modules.theirs

    def there(self, site: SiteRow) -> tuple[str, str]:
        """Module and name of a program point as the other step would call them."""
        module = self._theirs.get(site.module)
        if module is None:
            return f"\0{site.module}", site.name
        own = f"{site.module}." if site.module else ""
        name = site.name.removeprefix(own)
        moved = own and name != site.name and module != site.module
        return module, ".".join(filter(None, (module, name))) if moved else site.name


def _itself(site: SiteRow) -> tuple[str, str]:
    return site.module, site.name


def _keys(seen: Recording, numbers: dict[Hashable, int], called: Callable[[SiteRow], tuple[str, str]]) -> IntArray:
    """A number for what each op does and where, the same for what is the same in another recording."""
    points = [numbers.setdefault(_point(site, *called(site)), len(numbers)) for site in seen.sites]
    own = np.array(points, np.int64)[seen.site] if len(seen) else np.empty(0, np.int64)
    return own * (1 << 16) + seen.micro_batch


def _point(site: SiteRow, module: str, name: str) -> Hashable:
    phase = Phase.FORWARD if site.phase == Phase.LOSS else site.phase
    return module, phase, site.op, name, site.grad_fn


def _is_of(seen: Recording, names: Iterable[str]) -> BoolArray:
    """Which ops ran in one of these modules."""
    known = frozenset(names)
    flags = np.array([name in known for name in seen.modules], np.bool_)
    return flags[seen.module] if len(seen) else np.empty(0, np.bool_)


def _before(paired: BoolArray, places: IntArray) -> IntArray:
    """The last paired op before each place; -1 where there is none."""
    known = np.append(-1, np.flatnonzero(paired))
    found: IntArray = known[np.searchsorted(known, places) - 1]
    return found


def _weak_keys(seen: Recording, places: IntArray, gaps: IntArray, numbers: dict[Hashable, int]) -> IntArray:
    """A number for what each of some ops does, between which others."""
    keys = []
    for at, gap in zip(places.tolist(), gaps.tolist(), strict=True):
        site = seen.site_of(at)
        point = gap, site.op, site.phase, site.grad_fn, int(seen.micro_batch[at])
        keys.append(numbers.setdefault(point, len(numbers)))
    return np.array(keys, np.int64)


def _computing(seen: Recording) -> BoolArray:
    """Ops that are neither casts nor ways in and out of the step."""
    return ~seen.cast & ~seen.entry & ~seen.sink


def _matched(one: IntArray, other: IntArray, *, alike: bool) -> tuple[IntArray, IntArray]:
    """Each key's first occurrence with the first, and so on, as indices; with ``alike`` of keys as frequent in both."""
    mine, theirs = _places(one.tolist()), _places(other.tolist())
    pairs = [
        pair
        for key, here in mine.items()
        if key in theirs and (not alike or len(here) == len(theirs[key]))
        for pair in zip(here, theirs[key], strict=False)
    ]
    first, second = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(first, np.int64), np.array(second, np.int64)


def _places(keys: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for at, key in enumerate(keys):
        found.setdefault(key, []).append(at)
    return found
