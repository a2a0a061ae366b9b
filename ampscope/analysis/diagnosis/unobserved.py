"""Runs of which nothing was seen that would allow a verdict, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect, collect_groups, rank_table
from ampscope.analysis.words.rank_words import ranks_in_words
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table
from ampscope.trace.vocabulary import BESIDE, DEVICE_FAILED, STEP_RECORD, STEP_TAPE, SWITCHED_OFF

_STARTING = "Nothing was observed yet: the process is alive, and no optimizer step of the model was seen so far."
_NO_STEP = (
    "Nothing was observed: no optimizer step of the watched model was seen. Call ampscope.watch in the process that "
    "trains, before its loop, with the very model that it trains. A loop whose weights follow no gradient that torch "
    "computed backwards (finite differences, forward-mode derivatives) is not seen."
)
_FAULT = (
    "That is a fault of AMPscope, which the training does not feel: report it with this text, and watch the next run "
    "to know."
)

#: Parts that are told one by one.
_MOST_TOLD = 12

_OF_DEVICE = (
    "That is an error of the training's own: run it with CUDA_LAUNCH_BLOCKING=1, and the traceback shows what failed."
)


def unobserved(run: Run, rank: int, steps: int) -> str:
    """Why nothing can be said of a run, with what to do; empty where it was observed.

    Args:
        run: The run.
        rank: Whose steps count.
        steps: How many attempts it recorded.
    """
    ended = _ended_early(run, rank, steps)
    if ended or not steps:
        return ended or (_STARTING if run.status == "open" else _NO_STEP)
    told = [event for event in run.rows(Table.EVENTS, rank=rank) if event.kind in (EventKind.UNSEEN, EventKind.SEEN)]
    if not told or told[-1].kind == EventKind.SEEN or told[-1].segment < _last(run, rank, "segment"):
        return ""
    counted = f"{steps:,} steps were" if steps > 1 else "1 step was"
    return f"{counted} recorded, but not what they computed: {told[-1].text}."


def not_looked_at(run: Run) -> tuple[str, ...]:
    """Why not all of a run was looked at that should have been, in sentences; whatever it was, it is not just healthy.

    Args:
        run: The run.
    """
    where = f"kind = '{EventKind.WARNING}' AND contains(text, '{SWITCHED_OFF}')"
    columns = 'text, min(step) AS since, list(DISTINCT "rank") AS ranks'
    found = collect_groups(run.table(Table.EVENTS), columns, "text", where=where, order="since, text", limit=_MOST_TOLD)
    off = [each for each in found if not each[0].startswith(BESIDE)]
    told = [_told_off(text, step, ranks if len(run.ranks) > 1 else ()) for text, step, ranks in off]
    return *told, *dict.fromkeys(_whose(text) for text, *_ in off)


def _told_off(text: str, step: int, ranks: Sequence[int]) -> str:
    of = f" of {ranks_in_words(ranks)}" if ranks else ""
    left = " From there on losses and gradients were judged, and little else." if text.startswith(STEP_TAPE) else ""
    return f"At step {step:,}{of} {text}.{left}"


def _ended_early(run: Run, rank: int, steps: int) -> str:
    """Why the end of a run was not recorded; empty where capture lasted as long as the run."""
    newest = _last(run, rank, "segment") if steps else 0
    warnings = [event for event in run.rows(Table.EVENTS, rank=rank, kind=EventKind.WARNING) if event.segment >= newest]
    record = next((event for event in warnings if event.text.startswith(f"{STEP_RECORD} {SWITCHED_OFF}")), None)
    if record is None:
        return ""
    return f"Nothing is known of the run from step {record.step:,} on: {record.text}. {_whose(record.text)}"


def _whose(text: str) -> str:
    """Whose fault it was that a part switched itself off, and what to do."""
    return _OF_DEVICE if DEVICE_FAILED in text else _FAULT


def _last(run: Run, rank: int, column: str) -> int:
    """The newest step, or the newest segment that made steps."""
    (found,) = collect(rank_table(run, Table.STEPS, rank).select(nw.col(column).max()))
    return int(found[column])
