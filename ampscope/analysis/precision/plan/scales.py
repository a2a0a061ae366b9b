"""The scale that delayed scaling gives a tensor: by the largest magnitude of the steps before.

A trace has some of these steps, the recipe has had them all. So to those that were recorded comes the step just before,
taken to lie on the way, even in factors, from the newest of them to what was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, FloatArray
from ampscope.analysis.tables.exponent_rows import Execution, MeasuredRow
from ampscope.analysis.tables.lazy_tables import collect_groups, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

#: Recorded steps whose largest magnitudes are remembered. Recipes remember 16 to 1024 steps, of which a trace has some.
HISTORY = 16


def amax_before(
    run: Run, rank: int, rows: Sequence[MeasuredRow], done: Sequence[Execution]
) -> tuple[FloatArray, BoolArray]:
    """Of each row, the largest magnitude of its place in the recorded steps before, and whether there is any.

    Where there is none, the row's own has to do, as in the first step of a training. Gradients are compared without the
    loss scale, which may have changed.

    Args:
        run: The run.
        rank: One of its ranks.
        rows: What was measured.
        done: The executions whose extremes tell of the steps before.
    """
    by_place = _largest(run, rank, rows, done)
    found, known = np.full(len(rows), np.nan), np.zeros(len(rows), np.bool_)
    for number, row in enumerate(rows):
        steps, sizes = by_place.get((row.site.site, row.out), ([], []))
        end = bisect_left(steps, row.execution.step)
        recorded = sizes[max(0, end - HISTORY) : end]
        if recorded and recorded[-1] > 0:
            found[number] = max(*recorded, _step_before(row, steps[end - 1], recorded[-1])) * row.loss_scale
            known[number] = True
    return found, known


def _step_before(row: MeasuredRow, step: int, size: float) -> float:
    """The largest magnitude in the step before a row's, if it went evenly from what it was in an earlier ``step``."""
    now, way = row.largest / row.loss_scale, 1.0 / (row.execution.step - step)
    return float(size**way * now ** (1.0 - way))


def _largest(
    run: Run, rank: int, rows: Sequence[MeasuredRow], done: Sequence[Execution]
) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """By place, the steps in which it was measured, ascending, and its largest finite magnitude in each."""
    sites = {row.site.site: row for row in rows}
    scales = {(each.step, each.source): each.scale for each in done}
    if not sites:
        return {}
    size = 'max(greatest(abs("min"), abs("max")))'
    keys = "step, source, site, out"
    where = f'site IN ({", ".join(map(str, sites))}) AND isfinite("min") AND isfinite("max")'
    groups = collect_groups(rank_table(run, Table.OPS, rank), f"{keys}, {size} AS size", keys, where=where)
    sizes: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for step, source, site, out, top in groups:
        scale = scales.get((step, source))
        if scale is not None:
            seen = sizes[site, out]
            own = top / (scale if sites[site].is_gradient else 1.0)
            seen[step] = max(seen.get(step, 0.0), own)
    return {place: (sorted(seen), [seen[step] for step in sorted(seen)]) for place, seen in sizes.items()}
