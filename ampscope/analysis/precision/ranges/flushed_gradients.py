"""The zeros of parameters' gradients that are none where the step was run again in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from ampscope.analysis.precision.ranges.places import Place, place_of
from ampscope.analysis.precision.ranges.sampled_steps import Sampled
from ampscope.analysis.tables.lazy_tables import collect_groups, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Node, Source, Table, Trigger, source_of

#: Steps that are looked at: the newest.
_MOST_STEPS = 16


class Flushed(NamedTuple):
    """What is known of a gradient's zeros."""

    zeros: int = 0  #: those that float32 would not have had
    judged: int = 0  #: elements of which it is known


def flushed_gradients(run: Run, rank: int, sampled: Sampled) -> Mapping[Place, Flushed]:
    """The gradients of the steps that lost some: there the same step in float32 was recorded with every statistic."""
    rows = run.rows(Table.INCIDENTS, rank=rank)
    lost = {row.step for row in rows if row.trigger == Trigger.LOST_GRADIENT} - set(sampled.unlike)
    if not lost:
        return {}
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank) if site.op == Node.GRADIENT}
    where = f"zeros IS NOT NULL AND site IN ({', '.join(map(str, sites)) or -1})"
    ops = rank_table(run, Table.OPS, rank, step=sorted(lost)[-_MOST_STEPS:])
    by_run: dict[str, dict[tuple[int, str], tuple[int, int, int]]] = defaultdict(dict)
    for source, step, site, zeros, numel in collect_groups(
        ops, "source, step, site, sum(zeros), sum(numel)", "source, step, site", where=where
    ):
        by_run[source][step, sites[site].name] = site, int(zeros), int(numel)
    found: dict[Place, Flushed] = defaultdict(Flushed)
    for optimizer in set(sampled.optimizers.values()):
        wide = by_run[source_of(Source.REPLAY_FP32, optimizer)]
        for key, (site, zeros, numel) in by_run[source_of(Source.REPLAY, optimizer)].items():
            place = place_of(sites[site], 0, optimizer)
            if key in wide and wide[key][2] == numel and place is not None:
                before = found[place]
                more = max(0, zeros - wide[key][1])
                found[place] = Flushed(before.zeros + more, before.judged + numel)
    return found
