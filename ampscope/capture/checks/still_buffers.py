"""Notices buffers in half precision whose updates are rounded away: running statistics that never leave their start.

At a few steps the buffers are compared with what they were when the step began. Where one has not moved, two replays in
float32 tell where it should have moved, and towards what. One that has come to its end moves to and fro in float32; one
that is rounded away moves the same way each time, and is far from where it is heading.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replay_change import EverythingIn
from ampscope.capture.changes.replay_results import Symptom
from ampscope.capture.events import StepAttempt, StepObserver
from ampscope.capture.isolation import memory
from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.loop_state.state_watch import is_due
from ampscope.capture.loop_state.still_averages import LARGER, MOST_STILL, READINGS, Movement, Stillness, movement_of
from ampscope.capture.rerun import player, step_replay
from ampscope.capture.rerun.player import Player
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.verdict import Verdict
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Trigger


class Movements(NamedTuple):
    """The movements of buffers in a step that was run again in float32."""

    of: dict[str, Movement]  #: by qualified name; empty where the step could not be run again
    seconds: float


def moved_in_float32(step: TapedStep, models: Models, names: frozenset[str], guard: Guard) -> Movements:
    """Runs ``step`` twice in float32, the second time from larger buffers.

    Args:
        step: The step, before its optimizer has moved the weights.
        models: The watched models.
        names: The buffers of interest.
        guard: Catches faults of the tracer.

    Returns:
        Where they move. Nothing of the training is different afterwards.
    """
    started = time.perf_counter()
    once = _before_and_after(step, models, names, guard)
    averages = {id(held) for module, key, held in models.buffers() if ".".join(filter(None, (module, key))) in names}
    larger = step._replace(state=_LargerBuffers(step.state, averages))
    again = _before_and_after(larger, models, names, guard) if once else {}
    found = {}
    for name, (before, after) in once.items():
        if name in again:
            found[name] = movement_of(before, after, *again[name])
    return Movements(found, time.perf_counter() - started)


def _before_and_after(
    step: TapedStep, models: Models, names: frozenset[str], guard: Guard
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each buffer's values before and after the step, in float32; empty where it could not be run."""
    change, stops = EverythingIn(torch.float32), (player.call_user.__code__,)
    tracer = Tracer(Sites(0, models.module_type), models.names, full=False, guard=guard, stops=stops)
    replay = Player(step, models, tracer, change)
    failed = step_replay.why_not(step, models) or step_replay.play(replay, memory.room(models.main_device()))
    tracer.release()
    return {} if failed else {name: pair for name, pair in replay.buffers_moved() if name in names}


class _LargerBuffers(StateSnapshot):
    """A snapshot some of whose tensors are larger than they were.

    Args:
        snapshot: As they were.
        larger: ``id`` of those.
    """

    def __init__(self, snapshot: StateSnapshot, larger: set[int]) -> None:
        self.__dict__.update(snapshot.__dict__)
        self._larger = larger

    def at_start(self, tensor: Tensor) -> Tensor | None:
        """See `StateSnapshot.at_start`."""
        found = super().at_start(tensor)
        if found is None or id(tensor) not in self._larger:
            return found
        return torch.where(found == 0, torch.ones_like(found), found * LARGER)


class StillBuffers(StepObserver):
    """Looks at the buffers in half precision of some good steps, before the weights move.

    Args:
        models: The watched models.
        incidents: Reports what stands still.
        tape: What a replay needs.
        budget: Whether it can be afforded.
        cycle: Where the step is.
        guard: Catches faults of looking.
    """

    def __init__(
        self, models: Models, incidents: Incidents, tape: StepTape, budget: ReplayBudget, cycle: StepCycle, guard: Guard
    ) -> None:
        self.guard = guard
        self._models = models
        self._incidents = incidents
        self._tape = tape
        self._budget = budget
        self._cycle = cycle
        self._readings: dict[str, Stillness] = {}
        self._told: set[str] = set()
        self._looks = 0  # replays made

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks, if the turn has come."""
        if attempt.bad or self._tape.guard.broken or not is_due(attempt.step):
            return
        half = {name: buffer for name, buffer in self._half() if name not in self._told}
        if not half:
            return
        recording = self._tape.recording()
        still = frozenset(name for name, buffer in half.items() if _stands_still(buffer, recording))
        for name in self._readings.keys() - still:
            del self._readings[name]
        affordable = self._budget.allows_look(whatever_it_costs=self._looks < READINGS)
        if not still or recording.has_received() or not affordable:
            return
        self._looks += 1
        with self._cycle.inside(State.JUDGING):
            movements = moved_in_float32(recording, self._models, still, self.guard)
        self._budget.spent(movements.seconds)
        attempt.judging_s += movements.seconds
        for name, movement in movements.of.items():
            known = self._readings.setdefault(name, Stillness(half[name].dtype))
            known.read(attempt.step, half[name], movement)
        found = [name for name in movements.of if self._readings[name].is_lost]
        if found:
            self._tell(attempt, recording, found)

    def _half(self) -> list[tuple[str, Tensor]]:
        return [
            (".".join(filter(None, (module, name))), buffer)
            for module, name, buffer in self._models.buffers()
            if buffer.dtype in HALF and type(buffer) is Tensor and buffer.numel()
        ]

    def _tell(self, attempt: StepAttempt, recording: TapedStep, names: list[str]) -> None:
        self._told.update(names)
        found = tuple(self._readings.pop(name).described(name) for name in names)
        with self._cycle.inside(State.JUDGING):
            bad = Verdict(Trigger.BUFFER_STANDS_STILL, Symptom(), Evidence(still=found))
            self._incidents.judge(attempt, bad, recording)


def _stands_still(buffer: Tensor, step: TapedStep) -> bool:
    """Whether nearly all of a buffer is as it was when the step began; waits for the device."""
    before = step.state.at_start(buffer)
    return before is not None and float((before == buffer).float().mean()) >= MOST_STILL
