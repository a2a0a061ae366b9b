"""Recognises learning rate schedulers that step although the optimizer step before them was skipped."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import Optimizer


@dataclass(slots=True)
class _Attempts:
    """The step attempts of one optimizer so far."""

    count: int = 0
    step: int = 0  #: number of the latest
    skipped: bool = False


class SchedulerSteps:
    """How often each scheduler steps, counted in attempts of its optimizer."""

    def __init__(self) -> None:
        self._attempts: dict[int, _Attempts] = {}  # by id of the optimizer
        self._counts: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id of each scheduler, at its latest step

    def attempted(self, optimizer: Optimizer, step: int, *, skipped: bool) -> None:
        """An attempt is over."""
        mine = self._attempts.setdefault(id(optimizer), _Attempts())
        mine.count, mine.step, mine.skipped = mine.count + 1, step, skipped

    def stepped(self, scheduler: Any) -> int | None:
        """A scheduler steps.

        Returns:
            The number of the skipped step that it takes for a step: one that follows every attempt should have waited.
            None where it does right, and for a scheduler of epochs, which steps after many attempts.
        """
        mine = self._attempts.get(id(scheduler.optimizer))
        if mine is None:
            return None
        known = self._counts.get(id(scheduler))
        since = mine.count - (known[1] if known is not None and known[0]() is scheduler else 0)
        self._counts[id(scheduler)] = weakref.ref(scheduler), mine.count
        return mine.step if mine.skipped and since == 1 else None
