"""Scalers of a resumed run that began anew, though the run had found another loss scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampscope.analysis.tables.lazy_tables import collect_expressions, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ScalerAction, ScalerEventRow, Table

#: What changes no scale, and of which a long run has millions.
_ROUTINE = ", ".join(f"'{action}'" for action in (ScalerAction.UNSCALE, ScalerAction.SKIP))
#: The order of what happens to a scaler at one moment of one step.
_ORDER = [str(action) for action in ScalerAction]
#: Events that may share the newest moment and step of a scaler.
_MOST_AT_ONCE = 64


def not_restored(run: Run, rank: int) -> Iterator[tuple[ScalerEventRow, float]]:
    """Scalers of a resumed run that began at their initial scale, each with the other one that the run had found.

    Args:
        run: The run.
        rank: One of its ranks.
    """
    loads = run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.STATE_LOADED)
    loaded = {(event.segment, event.scaler) for event in loads}
    for start, before in _resumed(run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.INIT)):
        if (start.segment, start.scaler) in loaded or start.scale_after is None:
            continue
        last = _last_scale(run, rank, start.segment - 1, before)
        if last is not None and start.scale_after != last:
            yield start, last


def _resumed(starts: Sequence[ScalerEventRow]) -> Iterator[tuple[ScalerEventRow, int]]:
    """The beginning of each scaler of a resumed segment, with the number of the scaler whose place it takes.

    A segment's scalers take the places of those of the segment before in the order in which they first scaled.
    """
    for start in starts:
        peers = [event.scaler for event in starts if event.segment == start.segment]
        predecessors = [event.scaler for event in starts if event.segment == start.segment - 1]
        place = peers.index(start.scaler)
        if place < len(predecessors):
            yield start, predecessors[place]


def _last_scale(run: Run, rank: int, segment: int, scaler: int) -> float | None:
    """The newest scale that is known of a scaler; None where none is."""
    found = collect_expressions(
        rank_table(run, Table.SCALER_EVENTS, rank),
        "time, step, action, scale_after",
        where=f"segment = {segment} AND scaler = {scaler} AND scale_after IS NOT NULL AND action NOT IN ({_ROUTINE})",
        order="time DESC, step DESC",
        limit=_MOST_AT_ONCE,
    )
    known = sorted((time, step, _ORDER.index(action), scale) for time, step, action, scale in found if action in _ORDER)
    return float(known[-1][3]) if known else None
