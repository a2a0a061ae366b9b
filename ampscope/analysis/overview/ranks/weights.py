"""The weights of replicas at steps that several of them traced: each parameter has the same extremes on all.

A trace holds the smallest and the largest element of each parameter as a traced step found it, and nothing finer: what
changes none of the two is not seen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect, collect_groups
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Node, Table

#: Steps that are compared, the first and the last among them, and ranks, evenly chosen.
MOST_STEPS, MOST_RANKS = 3, 128
Extremes = tuple[float | None, float | None]


def traced_together(run: Run, group: Sequence[int]) -> list[int]:
    """The steps that more than one rank of ``group`` traced, in order."""
    members = "" if len(group) == len(run.ranks) else f" AND rank IN ({', '.join(map(str, group))})"
    where = f"traced <> ''{members}"
    rows = collect_groups(
        run.table(Table.STEPS), "step, count(DISTINCT rank) AS n", "step", where=where, having="n > 1"
    )
    return sorted(step for step, _ in rows)


def spread(steps: Sequence[int]) -> list[int]:
    """The places of some of ``steps``, the first and the last among them."""
    return sorted({place * (len(steps) - 1) // (MOST_STEPS - 1) for place in range(MOST_STEPS)}) if steps else []


def first_differing(run: Run, group: Sequence[int], steps: Sequence[int], parameter: str) -> int:
    """The place in ``steps`` from which on a parameter differs: they agree at the first of them, and not at the last.

    Looks at few of them, by halves: ranks whose weights have parted do not come together again.
    """
    agree, differ = 0, len(steps) - 1
    while differ - agree > 1:
        middle = (agree + differ) // 2
        values = extremes(run, group, steps[middle]).get(parameter)
        if values is None or differing(values) is None:
            agree = middle
        else:
            differ = middle
    return differ


def extremes(run: Run, group: Sequence[int], step: int) -> Mapping[str, Mapping[int, Extremes]]:
    """Of each parameter, its smallest and its largest element on each rank of ``group`` as ``step`` found it."""
    chosen = tuple(group[:: math.ceil(len(group) / MOST_RANKS)])
    sites = run.table(Table.SITES, rank=chosen).filter(nw.col("op") == str(Node.PARAMETER))
    ops = run.table(Table.OPS, step=step, rank=chosen).select("rank", "site", "min", "max")
    rows = collect(ops.join(sites.select("rank", "site", "name"), on=["rank", "site"]))
    found: dict[str, dict[int, Extremes]] = defaultdict(dict)
    for row in rows:
        if row["min"] is not None:
            found[row["name"]][row["rank"]] = (row["min"], row["max"])
    return found


def differing(values: Mapping[int, Extremes]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ranks that differ from the majority, and the majority; all and none without one, None where all agree."""
    usual, count = Counter(map(repr, values.values())).most_common(1)[0]
    others = tuple(rank for rank, each in sorted(values.items()) if repr(each) != usual)
    if not others:
        return None
    if 2 * count <= len(values):
        return tuple(sorted(values)), ()
    return others, tuple(rank for rank in sorted(values) if rank not in others)
