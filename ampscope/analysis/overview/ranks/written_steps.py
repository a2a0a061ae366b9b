"""Steps that the optimizer took although their gradients were not finite: what it wrote is not finite either."""

from __future__ import annotations

from ampscope.analysis.overview.ranks.sightings import MOST
from ampscope.analysis.tables.lazy_tables import collect_groups
from ampscope.analysis.tables.remembered import remembered
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

#: Of the cast value, or the engine would leave out parts by their bounds, which say nothing of NaN.
_WRITTEN = "NOT skipped AND NOT isfinite(try_cast(coalesce(clipped_grad_norm, grad_norm) AS FLOAT))"


@remembered(Table.STEPS)
def written_steps(run: Run) -> frozenset[tuple[int, int]]:
    """Optimizer and step of each attempt that went through with gradients that were not finite, on any rank."""
    keys = "optimizer, step"
    rows = collect_groups(run.table(Table.STEPS), keys, keys, where=_WRITTEN, order="step, optimizer", limit=MOST)
    return frozenset((optimizer, step) for optimizer, step in rows)
