"""The modules of a recording as a tree, unfolded around the op under the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ampscope.analysis.curve import IntArray
from ampscope.analysis.dtypes import ran_in
from ampscope.analysis.replay import Recording
from ampscope.analysis.replay_op import Magnitudes, known


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
        self.position = position
        self.current = seen.modules[int(seen.module[position])]
        self.nodes = _nodes(seen.modules)
        self.side = (seen.backward == seen.backward[position]) & ~seen.sink

    def branches(self, parent: str | None) -> Iterator[Branch]:
        for name in self.nodes[parent].children:
            branch = self._branch(self.nodes[name])
            yield branch
            if branch.is_above or (branch.is_current and name):
                yield from self.branches(name)

    def _branch(self, node: _Node) -> Branch:
        seen = self.seen
        wanted = np.zeros(len(seen.modules), np.bool_)
        wanted[list(node.below)] = True
        everywhere = wanted[seen.module] & ~seen.sink
        here = everywhere & self.side
        mine = np.flatnonzero(here if here.any() else everywhere)
        ran = mine[: int(np.searchsorted(mine, self.position, side="right"))]
        limits = np.where(np.isnan(seen.limit[ran]), np.inf, seen.limit[ran])
        narrowest = int(ran[limits.argmin()]) if len(ran) else None
        return Branch(
            name=node.name,
            kind=_kind(seen, node.name),
            depth=node.depth,
            first=int(mine[0]) if len(mine) else int(np.flatnonzero(wanted[seen.module])[0]),
            ops=len(mine),
            ran=len(ran),
            is_current=self.current == node.name,
            is_above=bool(node.name) and self.current.startswith(f"{node.name}."),
            magnitudes=_over(seen, ran, narrowest),
            dtype="" if narrowest is None else ran_in(seen.site_of(narrowest)),
            has_nonfinite=bool(seen.nonfinite[ran].any()),
            has_near=bool(seen.near[ran].any()),
        )


def _over(seen: Recording, ran: IntArray, narrowest: int | None) -> Magnitudes:
    """The band over some ops, against the narrowest dtype that one of them ran in."""
    smallest, largest = seen.smallest[ran], seen.largest[ran]
    return Magnitudes(
        smallest=known(np.fmin.reduce(smallest, initial=np.nan)),
        largest=known(np.fmax.reduce(largest, initial=np.nan)),
        floor=None if narrowest is None else known(seen.floor[narrowest]),
        limit=None if narrowest is None else known(seen.limit[narrowest]),
    )


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
