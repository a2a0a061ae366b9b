"""Runs of which nothing was seen that would allow a verdict, and what to do about it."""

from __future__ import annotations

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, EventRow, Table
from ampscope.trace.vocabulary import DEVICE_FAILED, STEP_RECORD, STEP_TAPE, SWITCHED_OFF

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


def _ended_early(run: Run, rank: int, steps: int) -> str:
    """Why a part of the loop was not looked at; empty where capture lasted as long as the run."""
    newest = _last(run, rank, "segment") if steps else 0
    warnings = [event for event in run.rows(Table.EVENTS, rank=rank, kind=EventKind.WARNING) if event.segment >= newest]
    record = next((event for event in warnings if _is_end_of(STEP_RECORD, event)), None)
    if record is not None:
        return f"Nothing is known of the run from step {record.step:,} on: {record.text}. {_whose(record)}"
    tape = next((event for event in warnings if _is_end_of(STEP_TAPE, event)), None)
    if tape is None or not steps or tape.step > _last(run, rank, "step"):  # what switched off then had seen all steps
        return ""
    return f"From step {tape.step:,} on losses and gradients were judged, and nothing else: {tape.text}. {_whose(tape)}"


def _whose(event: EventRow) -> str:
    """Whose fault it was that a part switched itself off, and what to do."""
    return _OF_DEVICE if DEVICE_FAILED in event.text else _FAULT


def _is_end_of(part: str, event: EventRow) -> bool:
    return event.text.startswith(f"{part} {SWITCHED_OFF}")


def _last(run: Run, rank: int, column: str) -> int:
    """The newest step, or the newest segment that made steps."""
    (found,) = collect(rank_table(run, Table.STEPS, rank).select(nw.col(column).max()))
    return int(found[column])
