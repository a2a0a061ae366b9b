"""Finds the values that carry the loss scale before backward: the scaled loss, and all that is made of it."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.provenance.graph import Graph
from ampscope.trace.schema import ENTRY_NODES, Node, Phase


class Scaled(NamedTuple):
    """The ops of one step that carry the loss scale, by sequence number."""

    scale: frozenset[int] = frozenset()  #: where the loss scale itself entered it
    carrying: frozenset[int] = frozenset()  #: what was computed from that, backward left out: all of it carries it


def scaled(graph: Graph, scale: float | None) -> Scaled:
    """Finds the ops outside of backward whose results carry the loss scale.

    A scale of 1 makes nothing larger, and other numbers are 1 as well.

    Args:
        graph: The step.
        scale: The loss scale that was in use; None without one.
    """
    if scale is None or scale == 1.0:
        return Scaled()
    found = frozenset(seq for seq in graph.outputs if _is_scale(graph, seq, scale))
    carrying: set[int] = set()
    ahead = list(found)
    while ahead:
        readers = {edge.seq for edge in graph.readers[ahead.pop()] if _is_of_the_loss(graph, edge.seq)}
        ahead += readers - carrying
        carrying |= readers
    return Scaled(found, frozenset(carrying))


def _is_of_the_loss(graph: Graph, seq: int) -> bool:
    site = graph.site(seq)
    return site.phase == Phase.LOSS or site.op == Node.LOSS


def _is_scale(graph: Graph, seq: int, scale: float) -> bool:
    """Whether a single number that entered the step in the loss's code is the scale."""
    site, row = graph.site(seq), graph.outputs[seq][0]
    return site.op in ENTRY_NODES and site.phase == Phase.LOSS and row.numel == 1 and row.min == row.max == scale
