"""Runs of which nothing was seen that would allow a verdict, and what to do about it."""

from __future__ import annotations

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table

_STARTING = "Nothing was observed yet: the process is alive, and no optimizer step of the model was seen so far."
_NO_STEP = (
    "Nothing was observed: no optimizer step of the watched model was seen. Call ampscope.watch in the process that "
    "trains, before its loop, with the very model whose parameters the optimizer holds."
)


def unobserved(run: Run, rank: int, steps: int) -> str:
    """Why nothing can be said of a run, with what to do; empty where it was observed.

    Args:
        run: The run.
        rank: Whose steps count.
        steps: How many attempts it recorded.
    """
    if not steps:
        return _STARTING if run.status == "open" else _NO_STEP
    told = [event for event in run.rows(Table.EVENTS, rank=rank) if event.kind in (EventKind.UNSEEN, EventKind.SEEN)]
    if not told or told[-1].kind == EventKind.SEEN or told[-1].segment < _last_segment(run, rank):
        return ""
    counted = f"{steps:,} steps were" if steps > 1 else "1 step was"
    return f"{counted} recorded, but not what they computed: {told[-1].text}."


def _last_segment(run: Run, rank: int) -> int:
    """The newest segment that made steps."""
    (found,) = collect(rank_table(run, Table.STEPS, rank).select(nw.col("segment").max()))
    return int(found["segment"])
