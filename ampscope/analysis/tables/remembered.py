"""Results over all ranks of a run, which take seconds on a large job: kept as long as the tables stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

R = TypeVar("R")


def remembered(*tables: Table) -> Callable[[Callable[[Run], R]], Callable[[Run], R]]:
    """Compute a result once for each open run and state of ``tables``."""

    def decorate(compute: Callable[[Run], R]) -> Callable[[Run], R]:
        known: WeakKeyDictionary[Run, tuple[Any, R]] = WeakKeyDictionary()

        @wraps(compute)
        def found(run: Run) -> R:
            state = tuple(run.stamp(table) for table in tables)
            if run not in known or known[run][0] != state:
                known[run] = state, compute(run)
            return known[run][1]

        return found

    return decorate
