"""Measures what a change that cures costs: time, by runs that nobody observes, and memory, as its ops have written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replaced_calls import OtherForm
from ampscope.capture.changes.replay_change import ModulesInFloat32, ReplayChange
from ampscope.capture.rerun import player, step_replay
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import Trial

#: Seconds up to which a run is made twice: so short a one is easily held up.
SHORT = 0.05
#: Share of a step by which two runs of the same may differ.
NOISE = 0.03


class _Unobserved(Tracer):
    """Sees nothing of what runs."""

    @contextlib.contextmanager
    def active(self) -> Iterator[Tracer]:
        """See `Tracer.active`; observes nothing."""
        yield self

    def name_entry(self, *_: Any) -> None:
        """See `Tracer.name_entry`."""

    def sink(self, *_: Any, **__: Any) -> None:
        """See `Tracer.sink`."""


def unobserved(models: Models, guard: Guard) -> Tracer:
    """Makes the tracer for a run of which nothing is to be seen."""
    stops = (player.call_user.__code__,)
    return _Unobserved(Sites(0, models.module_type), models.names, full=False, guard=guard, stops=stops)


class StepTimes:
    """Times a step with and without changes.

    Args:
        step: The step.
        models: The watched models.
        guard: Catches faults of the replay.
        budget: Is told of what was spent.
    """

    def __init__(self, step: TapedStep, models: Models, guard: Guard, budget: ReplayBudget) -> None:
        self._step = step
        self._models = models
        self._guard = guard
        self._budget = budget
        self._unchanged: dict[type[ReplayChange], list[float]] = {}

    def extra_time(self, change: ReplayChange) -> float | None:
        """Measures the share by which a change prolongs the step; 0 where that is within what two runs differ by.

        None where the step could not be run so.
        """
        changed, without = _to_time(change)
        kind = type(without)
        if kind not in self._unchanged:
            self._unchanged[kind] = self._seconds(without)
        unchanged, seconds = self._unchanged[kind], self._seconds(changed)
        if not unchanged or not seconds:
            return None
        least = min(unchanged)
        more = (min(seconds) - least) / least
        return more if more > max(NOISE, (max(unchanged) - least) / least) else 0.0

    def _seconds(self, change: ReplayChange) -> list[float]:
        """How long one run takes, or two short ones; none where one failed."""
        found: list[float] = []
        while not found or (len(found) < 2 and found[0] < SHORT):
            result = step_replay.retry(self._step, self._models, unobserved(self._models, self._guard), change)
            self._budget.spent(result.seconds)
            if result.outcome is Trial.UNAVAILABLE:
                return []
            found.append(result.seconds)
        return found


def _to_time(change: ReplayChange) -> tuple[ReplayChange, ReplayChange]:
    """A change as it is to be timed, and what watches for the same calls and changes nothing."""
    if isinstance(change, OtherForm):
        return change.to_time(applied=True), change.to_time(applied=False)
    return change, ModulesInFloat32(())
