"""The modules of a recording as a tree, unfolded around the op under the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray
from ampscope.analysis.numerics.dtypes import ran_in
from ampscope.analysis.replay.op_detail import Magnitudes, known
from ampscope.analysis.replay.recording import Recording
from ampscope.trace.dtypes import FINFO, FloatInfo

#: Formats, that with the least range first.
_NARROWEST = sorted(FINFO.values(), key=lambda one: (one.top, -one.lowest))
_RANKS = {one.name: rank for rank, one in enumerate(_NARROWEST)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A module as a line of the tree, with what its ops and those below it gave up to the cursor.

    Of the two directions of a step, forward and backward, only the one that the cursor is in counts; a module that
    runs in the other alone is told by it.
    """

    name: str  #: qualified; empty for what runs outside every module
    kind: str  #: its class, where one of its own ops tells
    depth: int
    first: int  #: position of its first op
    ops: int  #: all of them
    ran: int  #: those that the cursor has passed
    is_current: bool  #: the op under the cursor runs in it itself
    is_above: bool  #: the op under the cursor runs below it
    magnitudes: Magnitudes  #: over what ran; the limit is the lowest of all
    dtype: str  #: of the op with that limit
    has_nonfinite: bool
    has_near: bool


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    depth: int
    children: tuple[str, ...]
    below: frozenset[int]  #: indices into `Recording.modules`


def module_tree(seen: Recording, position: int) -> tuple[Branch, ...]:
    """The top modules, and below each ancestor of the op at ``position`` its children; empty for no ops."""
    if not len(seen):
        return ()
    return tuple(_Tree(seen, position).branches(None))


class _Tree:
    """The tree as seen from one op."""

    def __init__(self, seen: Recording, position: int) -> None:
        self.seen = seen
        self.current = seen.modules[int(seen.module[position])]
        self.nodes = _nodes(seen.modules)
        side = (seen.backward == seen.backward[position]) & ~seen.sink
        self.here = _Sums(seen, side, position)
        self.position = position

    @cached_property
    def anywhere(self) -> _Sums:
        return _Sums(self.seen, np.ones(len(self.seen), np.bool_), self.position)

    def branches(self, parent: str | None) -> Iterator[Branch]:
        for name in self.nodes[parent].children:
            branch = self._branch(self.nodes[name])
            yield branch
            if branch.is_above or (branch.is_current and name):
                yield from self.branches(name)

    def _branch(self, node: _Node) -> Branch:
        below = list(node.below)
        sums = self.here if self.here.ops[below].any() else self.anywhere
        own = sums.narrowest(below)
        return Branch(
            name=node.name,
            kind=_kind(self.seen, node.name),
            depth=node.depth,
            first=int(sums.first[below].min()),
            ops=int(sums.ops[below].sum()),
            ran=int(sums.ran[below].sum()),
            is_current=self.current == node.name,
            is_above=bool(node.name) and self.current.startswith(f"{node.name}."),
            magnitudes=Magnitudes(
                smallest=known(np.fmin.reduce(sums.smallest[below])),
                largest=known(np.fmax.reduce(sums.largest[below])),
                floor=own.lowest if own else None,
                limit=own.top if own else None,
            ),
            dtype=own.name if own else "",
            has_nonfinite=bool(sums.nonfinite[below].any()),
            has_near=bool(sums.near[below].any()),
        )


class _Sums:
    """What is known of each module over some ops, those up to a position counted as run.

    Args:
        seen: The recording.
        wanted: Which of its ops.
        position: The last that has run.
    """

    def __init__(self, seen: Recording, wanted: BoolArray, position: int) -> None:
        count = len(seen.modules)
        places = np.flatnonzero(wanted)
        ran = places[: int(np.searchsorted(places, position, side="right"))]
        module = seen.module[ran]
        self.ops = np.bincount(seen.module[places], minlength=count)
        self.ran = np.bincount(module, minlength=count)
        self.nonfinite = np.bincount(module[seen.alarming[ran]], minlength=count) > 0
        self.near = np.bincount(module[seen.near[ran]], minlength=count) > 0
        self.first = np.full(count, len(seen), np.int64)
        np.minimum.at(self.first, seen.module[places], places)
        self.smallest, self.largest = np.full(count, np.nan), np.full(count, np.nan)
        np.fmin.at(self.smallest, module, seen.smallest[ran])
        np.fmax.at(self.largest, module, seen.largest[ran])
        ranks = np.array([_RANKS.get(ran_in(site), len(_NARROWEST)) for site in seen.sites], dtype=np.int64)
        self._rank = np.full(count, len(_NARROWEST), np.int64)
        np.minimum.at(self._rank, module, ranks[seen.site[ran]])

    def narrowest(self, below: list[int]) -> FloatInfo | None:
        """The format with the least range that one of the modules computed in."""
        rank = int(self._rank[below].min())
        return _NARROWEST[rank] if rank < len(_NARROWEST) else None


def _kind(seen: Recording, name: str) -> str:
    return (
        next((site.module_type for site in seen.sites if site.module == name and site.module_type), "") if name else ""
    )


@lru_cache(maxsize=16)
def _nodes(modules: tuple[str, ...]) -> dict[str | None, _Node]:
    """Every module and ancestor by name; None stands above them all."""
    children: dict[str | None, dict[str, None]] = {None: {}}
    below: dict[str, set[int]] = {}
    for index, module in enumerate(modules):
        parent: str | None = None
        for name in _ancestry(module):
            children.setdefault(parent, {})[name] = None
            children.setdefault(name, {})
            below.setdefault(name, set()).add(index)
            parent = name
    nodes: dict[str | None, _Node] = {
        name: _Node(name, name.count("."), tuple(children[name]), frozenset(mine)) for name, mine in below.items()
    }
    nodes[None] = _Node("", -1, tuple(children[None]), frozenset())
    return nodes


def _ancestry(module: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c``."""
    parts = module.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
