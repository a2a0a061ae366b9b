"""Which module of one step is which of another: by weights, by name, and by what it looks like between the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ampscope.analysis.replay.pairing.sequences import ascending, common_subsequence
from ampscope.analysis.replay.recording import Recording
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, Phase, SiteRow

#: Cells of the table by which modules between two known ones are lined up.
_CELLS = 1 << 18
_NODES = frozenset(str(node) for node in ENTRY_NODES | SINK_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePairs:
    """Modules that ran, by name."""

    theirs: Mapping[str, str]  #: the other's name of each module that both have
    only_one: tuple[str, ...] = ()  #: in order of first execution
    only_other: tuple[str, ...] = ()

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Those with another name in the other step."""
        return tuple((mine, theirs) for mine, theirs in self.theirs.items() if mine != theirs)


@dataclass(slots=True)
class _Module:
    """What is known of a module."""

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
        mine, theirs = _once(self.one), _once(self.other)
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
        if not mine or not theirs or len(mine) * len(theirs) > _CELLS:
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
            for a, b in _beginnings(self.one[mine].name, self.other[theirs].name):
                votes.setdefault(a, Counter())[b] += 1
        for prefix, counted in votes.items():
            yield prefix, counted.most_common(1)[0][0]


def _beginnings(one: str, other: str) -> Iterator[tuple[str, str]]:
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


def _once(modules: Iterable[_Module]) -> dict[tuple[int, ...], int]:
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
