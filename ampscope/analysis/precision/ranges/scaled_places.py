"""The places outside of backward whose values carry the loss scale, and those that are the scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.analysis.precision.ranges.places import Place, place_of
from ampscope.analysis.precision.ranges.sampled_steps import Sampled
from ampscope.provenance.loss_scale import scaled
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Source, execution_of


class ScaledPlaces(NamedTuple):
    """Of one rank."""

    scale: frozenset[Place] = frozenset()  #: the loss scale itself
    carrying: frozenset[Place] = frozenset()


def scaled_places(run: Run, rank: int, sampled: Sampled, scale_at: Callable[[int, int], float | None]) -> ScaledPlaces:
    """Which places carry the loss scale, by the newest step that each optimizer's sampled steps end with.

    Args:
        run: The run.
        rank: The rank.
        sampled: Its sampled steps.
        scale_at: The loss scale that an optimizer's step ran with; None without one.
    """
    sites = Sites(run, rank)
    is_scale: set[Place] = set()
    carrying: set[Place] = set()
    for source, optimizer, step in _newest(sampled):
        scale = scale_at(optimizer, step)
        if scale is None:
            continue
        graph = StepGraph(run, sites, step, source)
        found = scaled(graph, scale)
        for places, seqs in ((is_scale, found.scale), (carrying, found.carrying)):
            rows = (row for seq in seqs for row in graph.outputs[seq])
            given = (place_of(graph.site(row.seq), row.out, optimizer) for row in rows)
            places |= {place for place in given if place is not None}
    return ScaledPlaces(frozenset(is_scale), frozenset(carrying - is_scale))


def _newest(sampled: Sampled) -> Iterator[tuple[str, int, int]]:
    """The newest step that was traced as it ran, and the newest of the replays: where a value enters has two names."""
    for source, optimizer in sampled.optimizers.items():
        is_live = execution_of(source)[0] == Source.LIVE
        steps = [step for step in sampled.course if (step in sampled.live) == is_live and step not in sampled.unlike]
        if steps:
            yield source, optimizer, steps[-1]
