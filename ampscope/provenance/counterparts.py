"""Pairs the ops of a step in half precision with those of the same step in float32."""

from __future__ import annotations

from collections import defaultdict

from ampscope.provenance.graph import Graph, op_name
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, OpRow, SiteRow

#: Ops that hand on the values they were given; with them, half precision has ops that float32 does without.
HANDS_ON = frozenset({"_to_copy", "clone", "copy", "detach", "alias", "view", "_unsafe_view"})
#: How far behind an op, through ops that hand on, something is looked for.
REACH = 4


class Counterparts:
    """Finds the results in a float32 replay that correspond to those of a step in half precision.

    Args:
        half: The step as it was.
        wide: The same step in float32.
    """

    def __init__(self, half: Graph, wide: Graph) -> None:
        self._half = half
        self._wide = wide
        self._partner = _partners(half, wide)

    def of(self, seq: int, out: int) -> OpRow | None:
        """Returns the float32 result that corresponds to an output; None where float32 has no such op."""
        for _ in range(REACH):
            partner = self._partner.get(seq)
            if partner is not None:
                there = self._wide.output(partner, out)
                return there if (there.out, there.numel) == (out, self._half.output(seq, out).numel) else None
            operands = self._half.inputs[seq]
            if op_name(self._half.site(seq).op) not in HANDS_ON or not operands:
                return None
            read = operands[-1]  # of a copy into memory, what is copied
            if read.partial:
                return None
            seq, out = read.from_seq, read.from_out
        return None


def _partners(half: Graph, wide: Graph) -> dict[int, int]:
    """Maps each op that hands nothing on to the other execution's: the same code, as often run."""
    mine, theirs = _by_point(half), _by_point(wide)
    found: dict[int, int] = {}
    for point, seqs in mine.items():
        others = theirs.get(point, [])
        if len(seqs) == len(others):
            found.update(zip(seqs, others, strict=True))
    return found


def _by_point(graph: Graph) -> dict[tuple[object, ...], list[int]]:
    points: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for seq in sorted(graph.outputs):
        site = graph.site(seq)
        if site.op not in SINK_NODES and op_name(site.op) not in HANDS_ON:
            points[_point(site, graph.outputs[seq][0].micro_batch)].append(seq)
    return points


def _point(site: SiteRow, micro_batch: int) -> tuple[object, ...]:
    op = site.op if site.op in ENTRY_NODES else op_name(site.op)
    return op, site.name, site.module, site.phase, site.grad_fn, site.file, site.line, micro_batch
