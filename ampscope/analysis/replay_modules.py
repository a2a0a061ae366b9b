"""The modules of a recording as a tree, unfolded around the op under the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ampscope.analysis.curve import IntArray
from ampscope.analysis.replay import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A module as a line of the tree; what is said of it holds for everything below it, in one direction of the step.

    Positions are of the direction (forward or backward) that the cursor is in, or of the other where it ran only there.
    """

    name: str  #: qualified; empty for what runs outside every module
    kind: str  #: its class, where one of its own ops tells
    depth: int
    first: int  #: position of its first op
    ops: int
    is_open: bool  #: its children follow
    is_current: bool  #: the op under the cursor runs in it itself
    is_above: bool  #: the op under the cursor runs below it
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
    nodes = _nodes(seen.modules)
    current = seen.modules[int(seen.module[position])]
    side = np.flatnonzero(seen.backward == seen.backward[position])
    return tuple(_branches(seen, nodes, nodes[None].children, current, side))


def _branches(
    seen: Recording, nodes: dict[str | None, _Node], names: tuple[str, ...], current: str, side: IntArray
) -> Iterator[Branch]:
    for name in names:
        node = nodes[name]
        above = bool(name) and (current == name or current.startswith(f"{name}."))
        yield _branch(seen, node, current, side)
        if above:
            yield from _branches(seen, nodes, node.children, current, side)


def _branch(seen: Recording, node: _Node, current: str, side: IntArray) -> Branch:
    wanted = np.zeros(len(seen.modules), np.bool_)
    wanted[list(node.below)] = True
    everywhere = np.flatnonzero(wanted[seen.module])
    here = everywhere[np.isin(everywhere, side, assume_unique=True)]
    mine = here if len(here) else everywhere
    above = bool(node.name) and current.startswith(f"{node.name}.")
    return Branch(
        name=node.name,
        kind=_kind(seen, node.name),
        depth=node.depth,
        first=int(mine[0]) if len(mine) else 0,
        ops=len(mine),
        is_open=(above or current == node.name) and bool(node.children),
        is_current=current == node.name,
        is_above=above,
        has_nonfinite=bool(seen.nonfinite[mine].any()),
        has_near=bool(seen.near[mine].any()),
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
