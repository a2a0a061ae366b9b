"""The scale that delayed scaling gives a tensor: by the largest magnitude of the steps before.

A trace has some of these steps, the recipe has had them all. So to those that were recorded comes the step just before,
taken to lie on the way, even in factors, from the newest of them to what was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, Columns, FloatArray, joined
from ampscope.analysis.tables.exponent_rows import Execution, MeasuredRow
from ampscope.analysis.tables.lazy_tables import group_columns, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Node, Table

#: Recorded steps whose largest magnitudes are remembered. Recipes remember 16 to 1024 steps, of which a trace has some.
HISTORY = 16
#: Recorded steps that are looked through for them, of what is measured by turns: gradients, and the like.
_BY_TURNS = 256
_NODES = frozenset(Node)


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
    nodes = {number for number, row in sites.items() if row.site.op in _NODES}
    pieces = []
    for asked, reach in ((sites.keys() - nodes, HISTORY), (nodes, _BY_TURNS)):
        steps = _steps_before({row.execution for row in rows if row.site.site in asked}, done, reach)
        if asked and steps:
            pieces.append(_extremes(run, rank, asked, steps))
    if not pieces:
        return {}
    seen = joined(pieces)
    executed = zip(seen.ints("step").tolist(), seen.arrays["source"].tolist(), strict=True)
    scale = np.array([scales.get(each, np.nan) for each in executed])
    is_gradient = np.isin(seen.ints("site"), [number for number, row in sites.items() if row.is_gradient])
    sizes = seen.floats("size") / np.where(is_gradient, scale, 1.0)
    return _by_place(seen.where(~np.isnan(scale)), sizes[~np.isnan(scale)])


def _by_place(seen: Columns, sizes: FloatArray) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """The steps of each site and output, ascending, and the largest of their sizes in each."""
    if not len(seen):
        return {}
    keys = np.stack([seen.ints("site"), seen.ints("out"), seen.ints("step")])
    order = np.lexsort(keys[::-1])
    keys, sizes = keys[:, order], sizes[order]
    begins = np.flatnonzero(np.append(True, (np.diff(keys) != 0).any(axis=0)))
    tops, steps = np.maximum.reduceat(sizes, begins).tolist(), keys[2, begins].tolist()
    places = keys[:2, begins]
    firsts = np.flatnonzero(np.append(True, (np.diff(places) != 0).any(axis=0))).tolist()
    named = map(tuple, places[:, firsts].T.tolist())
    ends = [*firsts[1:], len(steps)]
    return {
        (site, out): (steps[begin:end], tops[begin:end])
        for (site, out), begin, end in zip(named, firsts, ends, strict=True)
    }


def _steps_before(measured: Iterable[Execution], done: Sequence[Execution], reach: int) -> set[int]:
    """The recorded steps of the same optimizer, at most ``reach``, before each of those that were measured."""
    by_optimizer: Mapping[int, list[int]] = defaultdict(list)
    for each in done:
        by_optimizer[each.optimizer].append(each.step)
    steps = {number: sorted(set(own)) for number, own in by_optimizer.items()}
    found = set[int]()
    for each in measured:
        own = steps[each.optimizer]
        end = bisect_left(own, each.step)
        found.update(own[max(0, end - reach) : end])
    return found


def _extremes(run: Run, rank: int, sites: Iterable[int], steps: Collection[int]) -> Columns:
    """Step, source, site, output and its largest magnitude, where all of it was finite."""
    size = 'max(greatest(abs("min"), abs("max")))'
    keys = "step, source, site, out"
    where = f'site IN ({", ".join(map(str, sites))}) AND isfinite("min") AND isfinite("max")'
    return group_columns(rank_table(run, Table.OPS, rank, step=steps), f"{keys}, {size} AS size", keys, where=where)
