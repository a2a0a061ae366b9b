"""Works out what the other pages of a run will ask for, while its first page is being read.

On a run of fifty million rows that takes up to two seconds a page, and a person reads a verdict for longer. Of a run
that is being written nothing is done: its training needs the processor. A visit of any page stops it for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, Full, Queue

from ampscope.analysis.results import Incident
from ampscope.errors import AmpscopeError
from data.run_results import (
    closest_of,
    closeup_of,
    diagnosis_of,
    last_good_of,
    named_items,
    overview_of,
    place_of,
    plan_of,
    precision_over_steps_of,
    recorded_before,
    scale_answer_of,
)
from data.run_snapshot import RunSnapshot, cached

#: Seconds after a visit before anything is worked out: the page that is drawn then goes before.
_PAUSE = 0.5
_wanted: Queue[RunSnapshot] = Queue(maxsize=1)


def look_ahead(run: RunSnapshot) -> None:
    """Have the results of a run's pages worked out soon; those of a run asked for before it wait no longer."""
    if run.is_open:
        return
    with suppress(Empty):
        _wanted.get_nowait()
    with suppress(Full):  # another session was faster
        _wanted.put_nowait(run)


def work_ahead(done: Callable[[], None]) -> None:
    """Work out what `look_ahead` asks for, for as long as the server runs.

    Args:
        done: Called when all that the pages of a run ask for is there.
    """
    known: RunSnapshot | None = None
    while True:
        run = _wanted.get()
        time.sleep(_PAUSE)
        if run != known and _work_out(run):
            done()
            known = run


def _work_out(run: RunSnapshot) -> bool:
    """Work out what the pages of a run ask for; whether all of it is there before another visit."""
    for name in RESULTS:
        if not _wanted.empty():
            return False
        with suppress(AmpscopeError, OSError):  # the page says what is wrong, as where the run was deleted
            worked_out(run, name)
    return True


def _of_ranges(run: RunSnapshot) -> None:
    if rows := closest_of(run).rows:
        place_of(run, rows[0].key, None)


def _of_incident(run: RunSnapshot) -> None:
    for name, item in named_items(diagnosis_of(run)).items():
        if isinstance(item, Incident):
            own = replace(run, rank=item.rank)
            last_good_of(own, name)
            recorded_before(own, item, closeup_of(own, name))
        return  # the page begins with the first


def _of_scale(run: RunSnapshot) -> None:
    scale_answer_of(run, _first_optimizer(run))


def _of_precision(run: RunSnapshot) -> None:
    precision_over_steps_of(run, _first_optimizer(run) or 0)


def _of_plan(run: RunSnapshot) -> None:
    plan_of(run)


def _first_optimizer(run: RunSnapshot) -> int | None:
    """Returns the optimizer that a page shows first; None where there is only one."""
    numbers = overview_of(run, None).optimizers
    return numbers[0] if len(numbers) > 1 else None


#: By page, what it asks for; what is asked for most comes first.
RESULTS: dict[str, Callable[[RunSnapshot], None]] = {
    "Ranges": _of_ranges,
    "Incident": _of_incident,
    "Scale": _of_scale,
    "Precision": _of_precision,
    "Plan": _of_plan,
}


@cached(lambda run: run.stamps)
def worked_out(run: RunSnapshot, name: str) -> bool:
    """Whether what a page asks for is there; a result that asks for others shows nothing meanwhile."""
    RESULTS[name](run)
    return True
