"""Mixed precision that was asked for and has no effect: what the traced steps say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ampscope.analysis.tables.lazy_tables import collect_groups, rank_table
from ampscope.analysis.tables.step_history import History
from ampscope.trace.dtypes import FLOAT8, HALF_DTYPES
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Phase, SiteRow, Source, Table, execution_of
from ampscope.trace.vocabulary import MistakeForm

_HALF = frozenset((*HALF_DTYPES, *FLOAT8))
_FLOATS = frozenset(("float32", "float64"))
#: Parts of the names of ops that autocast runs in half precision wherever a region is on.
_CAST = ("mm", "linear", "convolution", "conv", "matmul", "attention")


def ops_by_dtype(run: Run, rank: int, sites: Sequence[SiteRow]) -> tuple[tuple[str, int], ...] | None:
    """How many floating-point ops of the traced steps gave which dtype, most first; None where some was in half."""
    if any(not _HALF.isdisjoint((*site.in_dtypes, *site.out_dtypes)) for site in sites):
        return None
    ops = filter(_is_op, sites)
    gives = {site.site: next((each for each in site.out_dtypes if each in _FLOATS), "") for site in ops}
    table = rank_table(run, Table.OPS, rank)
    found: Counter[str] = Counter()
    for site, source, count in collect_groups(table, "site, source, count(*) AS ops", "site, source"):
        if execution_of(source)[0] == Source.LIVE and gives.get(site):
            found[gives[site]] += count
    return tuple(found.most_common())


def without_region(sites: Sequence[SiteRow], history: Mapping[int, History]) -> MistakeForm | None:
    """How mixed precision came to nothing, of a run without an op in half; None where nobody asked for it."""
    ops = [site for site in sites if site.phase == Phase.FORWARD and _is_op(site)]
    forward = [site for site in ops if not _FLOATS.isdisjoint(site.out_dtypes)]
    castable = [site for site in forward if any(part in site.op for part in _CAST)]
    within = any(site.autocast for site in sites if site.phase in (Phase.FORWARD, Phase.LOSS))
    scaled = any(bool(np.isfinite(each.scale).any()) for each in history.values())
    if castable and all(not site.autocast for site in castable) and (within or scaled):
        return MistakeForm.AUTOCAST_OUTSIDE
    return MistakeForm.AUTOCAST_FLOAT32 if within and forward and all(site.autocast for site in forward) else None


def _is_op(site: SiteRow) -> bool:
    return "." in site.op  # others are pseudo-ops
