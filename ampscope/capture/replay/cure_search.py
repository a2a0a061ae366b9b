"""Asks what would have cured a bad step, and tries it: replays with one thing changed at a time."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import torch

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.replay import failure, memory, player, step_replay
from ampscope.capture.replay.changes import AllIn, Change, ConversionsIn32, ModulesIn32, Scale
from ampscope.capture.replay.failure import Observed, Suspect
from ampscope.capture.replay.player import Recording
from ampscope.capture.replay.step_replay import Tried
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace import schema
from ampscope.trace.schema import ReplayStatus, Trial

#: Modules that are added one after another to those in float32, before the search is given up.
MOST_MODULES = 8


class Trying(NamedTuple):
    """One change that was tried, with what came out and what was seen."""

    change: Change
    scale: float | None  #: it ran with
    came: Tried
    low: float | None  #: least value that the suspected op gave
    high: float | None
    seen: Observed  #: what ran this time


class _Seen(NamedTuple):
    """What a plan learns from a trial."""

    came: Tried
    again: Suspect | None  #: where values went wrong this time
    room: float | None  #: for a larger loss scale


#: A plan yields what to try next and is told what came out of it.
Plan = Generator[Change, _Seen, None]


def plan(found: Suspect, scale: float | None) -> Plan:
    """What to try on a failure, the most telling first.

    All in float32 comes first: where that fails too, precision has no part in it and nothing else is tried. Where it
    also replaced what the code itself converts to a half dtype, that is tried without any change of autocast.

    Args:
        found: Where the faithful replay placed it.
        scale: The loss scale of the step.
    """
    if not found.dtypes:
        return
    everything = AllIn(torch.float32)
    if (yield everything).came.outcome is Trial.NONFINITE:
        return
    if found.by_scale and scale is not None and scale > 1:
        yield from _largest_scale(scale)
    if everything.conversions:
        seen = yield ConversionsIn32()
        if seen.came.outcome is Trial.FINITE:
            return
        moved = seen.again if seen.again is not None and seen.again.spot != found.spot else None
        yield from _fewest_modules((moved or found).modules[:1], conversions=moved is not None)
    else:
        yield from _fewest_modules(found.modules[:1])
    if "float16" in found.dtypes:
        yield AllIn(torch.bfloat16)


def _largest_scale(scale: float) -> Plan:
    """A scale of 1, and from what it shows the largest power of two under which the gradients stay in range."""
    low = yield Scale(1.0)
    if low.came.outcome is not Trial.FINITE or low.room is None:
        return
    best = 2.0 ** math.floor(math.log2(low.room))
    if 1 < best < scale:
        yield Scale(best)


def _fewest_modules(first: tuple[str, ...], *, conversions: bool = False) -> Plan:
    """The suspected module alone; then also those in which values go wrong once it is cured.

    In every one of them a value is born non-finite of finite operands while the others are cured, so none can be left
    out.
    """
    chosen = first
    while len(chosen) <= MOST_MODULES:
        seen = yield ModulesIn32(chosen, conversions=conversions)
        more = tuple(name for name in seen.again.modules if name not in chosen) if seen.again is not None else ()
        if seen.came.outcome is not Trial.NONFINITE or not more:
            return
        chosen += more


class Counterfactuals:
    """Tries changes on bad steps, within the budget; a failure that comes again goes on where the last one stopped.

    Args:
        models: The watched models.
        sites: Numbers the program points of what may be recorded.
        budget: How many replays there may be.
        guard: Catches faults of the tracer.
    """

    def __init__(self, models: Models, sites: Sites, budget: ReplayBudget, guard: Guard) -> None:
        self._models = models
        self._sites = sites
        self._budget = budget
        self._guard = guard
        self._plans: dict[object, tuple[Plan, Change | None]] = {}

    def examine(self, recording: Recording, seen: Observed, status: ReplayStatus) -> list[Trying]:
        """Tries what may cure a step whose faithful replay is done.

        Args:
            recording: The step.
            seen: The records of its faithful replay.
            status: What that came to.

        Returns:
            What was tried, in order.
        """
        if status is ReplayStatus.NOT_REPRODUCED:
            return self._again(recording, seen)
        found = failure.suspect(seen, scaled=recording.scale is not None)
        return self._follow(found, recording, seen) if found is not None else []

    def _again(self, recording: Recording, seen: Observed) -> list[Trying]:
        """The same once more: a step on which two replays agree is deterministic."""
        if not self._budget.allows_trial(0):
            return []
        trying = self._try(Change(), None, recording)
        if trying.came.outcome is Trial.FINITE and not seen.agrees(trying.seen):
            reason = "two replays of the step differ: it is not deterministic"
            trying = trying._replace(came=trying.came._replace(reason=reason))
        return [trying]

    def _follow(self, found: Suspect, recording: Recording, seen: Observed) -> list[Trying]:
        key = (found.spot, found.by_scale)
        steps, change = self._plans.pop(key) if key in self._plans else _begun(plan(found, recording.scale))
        tried: list[Trying] = []
        while change is not None and self._budget.allows_trial(len(tried)):
            if not memory.fits(seen.bytes_written(), self._models.main_device()):
                came = Tried(Trial.UNAVAILABLE, "there is not enough free memory to run the step once more")
                tried.append(Trying(change, change.scale or recording.scale, came, None, None, seen))
                break
            tried.append(self._try(change, found, recording))
            change = _next(steps, _learned(tried[-1]))
        self._plans[key] = steps, change
        return tried

    def _try(self, change: Change, found: Suspect | None, recording: Recording) -> Trying:
        recorded = change.kind is schema.Change.FP32
        sites = self._sites if recorded else Sites(0, self._models.module_type)
        stops = (player.call_user.__code__,)
        tracer = Tracer(sites, self._models.names, full=False, guard=self._guard, stops=stops)
        came = step_replay.retry(recording, self._models, tracer, change)
        self._budget.spent(came.seconds)
        other = Observed(*tracer.rows(0, ""), sites)
        tracer.release()
        row = failure.output_at(other, found) if found is not None else None
        low, high = (row.min, row.max) if row is not None else (None, None)
        return Trying(change, change.scale or recording.scale, came, low, high, other)


def _begun(steps: Plan) -> tuple[Plan, Change | None]:
    return steps, next(steps, None)


def _next(steps: Plan, learned: _Seen) -> Change | None:
    try:
        return steps.send(learned)
    except StopIteration:
        return None


def _learned(trying: Trying) -> _Seen:
    came = trying.came
    again = failure.suspect(trying.seen, scaled=False) if came.outcome is Trial.NONFINITE else None
    room = failure.room_for_scale(trying.seen) if came.outcome is Trial.FINITE else None
    return _Seen(came, again, room)
