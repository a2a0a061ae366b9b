"""How much of a run was looked at, counted from its rows."""

from __future__ import annotations

from ampscope.analysis.results import Checked
from ampscope.analysis.tables.lazy_tables import collect_expressions, collect_groups, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table
from ampscope.trace.vocabulary import LOOK_EVERY, STATE_LOOK, SWITCHED_OFF

_JUDGED = "grad_norm IS NOT NULL OR found_inf IS NOT NULL OR averaged IS NOT NULL"
#: As `StateWatch` has it: after steps 0, 1, 2, 4, ... and then every so many, where the optimizer stepped.
_LOOKED = f"NOT skipped AND (step % {LOOK_EVERY} = 0 OR (step < {LOOK_EVERY} AND (step & (step - 1)) = 0))"


def checked(run: Run, rank: int) -> Checked:
    """What was looked at of a run.

    Args:
        run: The run.
        rank: Whose steps count.
    """
    off = f"starts_with(text, '{STATE_LOOK} {SWITCHED_OFF}')"
    ends = f"count(CASE WHEN kind = '{EventKind.CLOSE}' THEN 1 END), min(CASE WHEN {off} THEN step END)"
    ((closed, until),) = collect_expressions(rank_table(run, Table.EVENTS, rank), ends)
    looked = _LOOKED if until is None else f"{_LOOKED} AND step < {until}"
    counts = f"count_if(traced <> ''), count_if({_JUDGED}), count_if({looked}), max(step) - min(step) + 1 - count(*)"
    counted = collect_groups(rank_table(run, Table.STEPS, rank), f"optimizer, {counts}", "optimizer")
    _, traced, gradients, looks, lost = (sum(column) for column in zip(*counted, strict=True)) if counted else [0] * 5
    return Checked(traced=traced, gradients=gradients, state_looks=looks + (closed if until is None else 0), lost=lost)
