"""The ops of two recordings are paired by what they do and where, not by number, module by module.

Modules may be renamed, inserted or run in another dtype.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ampscope.analysis.arrays import BoolArray, IntArray
from ampscope.analysis.replay.recording import Recording
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, Phase, SiteRow

#: Widths of the neighbourhoods that are looked for where no element is found once in each sequence.
_WIDTHS = (1, 4, 16)
#: Cells of the table by which what lies between two anchors is lined up exactly.
_CELLS = 1 << 16
_MULTIPLIER = 0x9E3779B97F4A7C15


def align(one: IntArray, other: IntArray) -> IntArray:
    """Returns for each element of ``one`` the index of its counterpart in ``other``, -1 where it has none; ascending.

    What both begin and end with is taken as it is. In between, elements (or neighbourhoods of elements) that occur once
    in each are anchors, as in a patience diff; between two anchors the same again, and an exact longest common
    subsequence where that is small.
    """
    found = np.full(len(one), -1, np.int64)
    waiting = [(0, len(one), 0, len(other))]
    while waiting:
        start, stop, begin, end = _trimmed(one, other, waiting.pop(), found)
        if start == stop or begin == end:
            continue
        mine, theirs = one[start:stop], other[begin:end]
        if len(mine) * len(theirs) <= _CELLS:
            pairs = common_subsequence(mine.tolist(), theirs.tolist())
        else:
            pairs = _anchors(mine, theirs)
            marks = [(-1, -1), *pairs, (len(mine), len(theirs))]
            between = [(a + 1, c, b + 1, d) for (a, b), (c, d) in pairwise(marks)] if pairs else []
            waiting += [(start + a, start + c, begin + b, begin + d) for a, c, b, d in between]
        for mine_at, theirs_at in pairs:
            found[start + mine_at] = begin + theirs_at
    return found


def common_subsequence(one: list[int], other: list[int]) -> list[tuple[int, int]]:
    """The longest common subsequence as pairs of indices."""
    rows = [[0] * (len(other) + 1)]
    for value in reversed(one):
        below, row, best = rows[-1], [0] * (len(other) + 1), 0
        for at in range(len(other) - 1, -1, -1):
            best = below[at + 1] + 1 if value == other[at] else max(below[at], best)
            row[at] = best
        rows.append(row)
    rows.reverse()
    pairs, at, there = [], 0, 0
    while at < len(one) and there < len(other):
        if one[at] == other[there]:
            pairs.append((at, there))
            at, there = at + 1, there + 1
        elif rows[at + 1][there] >= rows[at][there + 1]:
            at += 1
        else:
            there += 1
    return pairs


def ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs, which ascend in the first index, that ascends in the second, too."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for number, (_, there) in enumerate(pairs):
        at = bisect_left(ends, there)
        before.append(places[at - 1] if at else -1)
        ends[at : at + 1] = [there]
        places[at : at + 1] = [number]
    kept, number = [], places[-1] if places else -1
    while number >= 0:
        kept.append(pairs[number])
        number = before[number]
    return kept[::-1]


def _trimmed(
    one: IntArray, other: IntArray, window: tuple[int, int, int, int], found: IntArray
) -> tuple[int, int, int, int]:
    """The window without what it begins and ends with in both, which goes into ``found``."""
    start, stop, begin, end = window
    size = min(stop - start, end - begin)
    head = _equal(one[start : start + size], other[begin : begin + size])
    found[start : start + head] = np.arange(begin, begin + head)
    start, begin, size = start + head, begin + head, size - head
    tail = _equal(one[stop - size : stop][::-1], other[end - size : end][::-1])
    found[stop - tail : stop] = np.arange(end - tail, end)
    return start, stop - tail, begin, end - tail


def _equal(one: IntArray, other: IntArray) -> int:
    """How many elements are the same before the first that is not."""
    apart = np.flatnonzero(one != other)
    return int(apart[0]) if len(apart) else len(one)


def _anchors(one: IntArray, other: IntArray) -> list[tuple[int, int]]:
    """Pairs of places, ascending, of which all but chance says that they are the same."""
    for width in _WIDTHS:
        if min(len(one), len(other)) < width:
            break
        pairs = _once(_neighbourhoods(one, width), _neighbourhoods(other, width))
        if pairs:
            return ascending(pairs)
    return ascending(_by_occurrence(one, other))


def _neighbourhoods(values: IntArray, width: int) -> IntArray:
    """A number for each ``width`` elements in a row."""
    mixed = np.zeros(len(values) - width + 1, np.uint64)
    with np.errstate(over="ignore"):
        for shift in range(width):
            part = values[shift : shift + len(mixed)].astype(np.uint64) + np.uint64(1)
            mixed = (mixed ^ (mixed >> np.uint64(29)) ^ part) * np.uint64(_MULTIPLIER)
    return mixed.view(np.int64)


def _once(one: IntArray, other: IntArray) -> list[tuple[int, int]]:
    """Returns the places in both of values that occur once in each, by place in ``one``."""
    (mine, here), (theirs, there) = _unique(one), _unique(other)
    _, first, second = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    return sorted(zip(here[first].tolist(), there[second].tolist(), strict=True))


def _unique(values: IntArray) -> tuple[IntArray, IntArray]:
    found, first, counts = np.unique(values, return_index=True, return_counts=True)
    return found[counts == 1], first[counts == 1]


def _by_occurrence(one: IntArray, other: IntArray) -> list[tuple[int, int]]:
    """Each value's first occurrence with the first, its second with the second."""
    return _once(_numbered(one), _numbered(other))


def _numbered(values: IntArray) -> IntArray:
    """Values made different by how often they occurred before."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    occurrence = np.empty(len(values), np.int64)
    occurrence[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return values * (1 << 24) + occurrence


#: Cells of the table by which modules between two known ones are lined up.
_MODULE_CELLS = 1 << 18
_NODES = frozenset(str(node) for node in ENTRY_NODES | SINK_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePairs:
    """Modules that ran, by name."""

    theirs: Mapping[str, str]  #: the other's name of each module that both have
    only_one: tuple[str, ...] = ()  #: in order of first execution
    only_other: tuple[str, ...] = ()

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """The pairs of modules with another name in the other step."""
        return tuple((mine, theirs) for mine, theirs in self.theirs.items() if mine != theirs)


@dataclass(slots=True)
class _Module:
    name: str
    kind: str = ""
    ops: tuple[str, ...] = ()  #: of its own forward
    shapes: tuple[str, ...] = ()  #: of its parameters
    weights: tuple[int, ...] = ()  #: their checksums

    @property
    def look(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        return self.kind, self.ops, self.shapes

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


def pair_modules(one: Recording, other: Recording) -> ModulePairs:
    """Pair the modules of two steps.

    The same weights, to the last bit, make the same module, whatever it is called; they also tell for the modules
    around it how names have changed. Else the same name and the same ops do, then the same ops between the same
    neighbours, then the name alone.
    """
    mine, theirs = _modules(one), _modules(other)
    found = _Found(mine, theirs)
    found.by_weights()
    found.by_name(alike=True)
    found.by_neighbours()
    found.by_name(alike=False)
    return ModulePairs(
        theirs={mine[a].name: theirs[b].name for a, b in sorted(found.pairs.items())},
        only_one=tuple(each.name for at, each in enumerate(mine) if at not in found.pairs),
        only_other=tuple(each.name for at, each in enumerate(theirs) if at not in found.taken),
    )


class _Found:
    """Pairs as they are found.

    Args:
        one: The modules of one step, in order of first execution.
        other: Those of the other.
    """

    def __init__(self, one: list[_Module], other: list[_Module]) -> None:
        self.one, self.other = one, other
        self.pairs: dict[int, int] = {}
        self.taken: set[int] = set()

    def add(self, mine: int, theirs: int) -> None:
        """Notes a pair, if neither has another partner."""
        if mine not in self.pairs and theirs not in self.taken:
            self.pairs[mine] = theirs
            self.taken.add(theirs)

    def by_weights(self) -> None:
        """Modules whose weights are the same and no other's."""
        mine, theirs = _by_weights(self.one), _by_weights(self.other)
        for weights, at in mine.items():
            if weights in theirs and self.one[at].shapes == self.other[theirs[weights]].shapes:
                self.add(at, theirs[weights])

    def by_name(self, *, alike: bool) -> None:
        """Modules of the name that the pairs known so far let expect; with ``alike`` only what looks the same."""
        places = {each.name: at for at, each in enumerate(self.other)}
        renamed = dict(self._prefixes())
        for at, each in enumerate(self.one):
            there = places.get(_expected(each.name, renamed))
            if there is not None and (not alike or each.look == self.other[there].look):
                self.add(at, there)

    def by_neighbours(self) -> None:
        """Modules that look the same and stand between the same pairs."""
        marks = [(-1, -1), *ascending(sorted(self.pairs.items())), (len(self.one), len(self.other))]
        for (a, b), (c, d) in pairwise(marks):
            mine = [at for at in range(a + 1, c) if at not in self.pairs]
            theirs = [at for at in range(b + 1, d) if at not in self.taken]
            for here, there in self._lined_up(mine, theirs):
                self.add(here, there)

    def _lined_up(self, mine: list[int], theirs: list[int]) -> Iterator[tuple[int, int]]:
        if not mine or not theirs or len(mine) * len(theirs) > _MODULE_CELLS:
            return
        numbers: dict[object, int] = {}
        here = [numbers.setdefault(self.one[at].look, len(numbers)) for at in mine]
        there = [numbers.setdefault(self.other[at].look, len(numbers)) for at in theirs]
        for first, second in common_subsequence(here, there):
            yield mine[first], theirs[second]

    def _prefixes(self) -> Iterator[tuple[str, str]]:
        """Beginnings of names that became others, by the pairs known so far; each as most of them say."""
        votes: dict[str, Counter[str]] = {}
        for mine, theirs in self.pairs.items():
            for a, b in beginnings_of(self.one[mine].name, self.other[theirs].name):
                votes.setdefault(a, Counter())[b] += 1
        for prefix, counted in votes.items():
            yield prefix, counted.most_common(1)[0][0]


def beginnings_of(one: str, other: str) -> Iterator[tuple[str, str]]:
    """``a.0``, ``a.1`` of ``a.0.fc``, ``a.1.fc``: what is left of both names without ends that they share."""
    mine, theirs = one.split("."), other.split(".")
    yield one, other
    while len(mine) > 1 and len(theirs) > 1 and mine[-1] == theirs[-1]:
        mine, theirs = mine[:-1], theirs[:-1]
        yield ".".join(mine), ".".join(theirs)


def _expected(name: str, renamed: Mapping[str, str]) -> str:
    """``name`` with its longest known beginning as the other has it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        beginning = ".".join(parts[:end])
        if beginning in renamed:
            return ".".join([renamed[beginning], *parts[end:]])
    return name


def _by_weights(modules: Iterable[_Module]) -> dict[tuple[int, ...], int]:
    """Modules by their weights, where no other module has the same."""
    places: dict[tuple[int, ...], list[int]] = {}
    for at, each in enumerate(modules):
        if each.weights:
            places.setdefault(each.weights, []).append(at)
    return {weights: at[0] for weights, at in places.items() if len(at) == 1}


def _modules(seen: Recording) -> list[_Module]:
    found = {name: _Module(name) for name in seen.modules}
    numbers, first = np.unique(seen.site, return_index=True)
    sums, known = seen.outputs.arrays["checksum"], seen.outputs.known("checksum")
    rows = seen.first_output[:-1][first]
    for number, row in sorted(zip(numbers.tolist(), rows.tolist(), strict=True), key=lambda each: each[1]):
        site = seen.sites[number]
        checksum = int(sums[row]) if known[row] else None
        _add(found[site.module], site, checksum)
    return list(found.values())


def _add(module: _Module, site: SiteRow, checksum: int | None) -> None:
    if site.op == Node.PARAMETER:
        module.shapes += tuple(site.out_shapes)
        module.weights += () if checksum is None else (checksum,)
    elif site.op not in _NODES and not site.cast and site.phase in (Phase.FORWARD, Phase.LOSS):
        module.ops += (site.op,)
        module.kind = module.kind or site.module_type


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpPairs:
    """Ops by position in their recordings."""

    theirs: IntArray  #: of each op of one the op of the other that is the same; -1 where there is none
    mine: IntArray  #: the other way round
    modules: ModulePairs


def producers(seen: Recording) -> list[list[int]]:
    """Returns for each op the positions of the ops that wrote its operands, by argument."""
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
        """Pairs the ops that are left, in whatever order; of ops that compute, only if both have as many left."""
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
        """Returns the op whose result a cast reads; -1 where that is not known."""
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
    """Maps the names of one step's modules and parameters to those in the other."""

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
    """Returns a mask of the ops that ran in one of these modules."""
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
