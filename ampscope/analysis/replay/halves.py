"""Which op of forward an op of backward belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampscope.analysis.numerics.arrays import IntArray
from ampscope.trace.schema import SiteRow


def forward_of(sites: Sequence[SiteRow], site: IntArray, micro_batch: IntArray) -> IntArray:
    """Of each op the position of the op of forward that it belongs to; -1 where it is none of backward.

    A program point that ran several times is matched in reverse within a micro-batch: backward undoes the last
    execution first.

    Args:
        sites: Program points.
        site: Of each op the index of its own.
        micro_batch: Of each op.
    """
    found = np.full(len(site), -1, np.int64)
    index = {row.site: place for place, row in enumerate(sites)}
    wanted = np.array([-1 if row.forward_site is None else index.get(row.forward_site, -1) for row in sites], np.int64)
    here = np.flatnonzero(wanted[site] >= 0) if len(site) else np.empty(0, np.int64)
    if not len(here):
        return found
    batch = micro_batch - micro_batch.min()
    width = int(batch.max()) + 1
    key = site * width + batch
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    own = np.searchsorted(ordered, key)
    rank = np.empty(len(site), np.int64)
    rank[order] = np.arange(len(site))
    turn = (rank - own)[here]
    mine = (np.searchsorted(ordered, key, side="right") - own)[here]
    forward = wanted[site[here]] * width + batch[here]
    start = np.searchsorted(ordered, forward)
    times = np.searchsorted(ordered, forward, side="right") - start
    per = np.maximum(mine // np.maximum(times, 1), 1)
    place = start + np.maximum(times - 1 - turn // per, 0)
    found[here[times > 0]] = order[place[times > 0]]
    return found
