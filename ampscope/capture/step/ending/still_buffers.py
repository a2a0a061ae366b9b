"""Notices buffers in half precision whose updates are rounded away: running statistics that never leave their start.

At a few steps the buffers are compared with what they were when the step began. Where one has not moved, two replays in
float32 tell where it should have moved, and towards what. One that has come to its end moves to and fro in float32; one
that is rounded away moves the same way each time, and is far from where it is heading.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.replay.results import Symptom
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.ending import moved_buffers
from ampscope.capture.step.ending.incidents import Incidents
from ampscope.capture.step.ending.moved_buffers import Movement
from ampscope.capture.step.ending.verdict import Verdict
from ampscope.capture.step.measures.state.state_watch import is_due
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.schema import Trigger

#: Steps in a row, of those that are looked at, in which a buffer has to stand still.
READINGS = 3
#: Share of a buffer's elements that must stand still although float32 moves them.
_MOST = 0.9
#: How far from where it is heading such an element must be, as a share of its value.
_FAR = 0.1


class _Reading(NamedTuple):
    """A step in which a buffer stood still."""

    step: int
    before: Tensor
    heading: Tensor  #: how far each element is from what it follows, by its movement in float32


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
        self._readings: dict[str, list[_Reading]] = defaultdict(list)
        self._told: set[str] = set()
        self._looks = 0  # replays made

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks, if the turn has come."""
        if attempt.bad or self._tape.broken or not is_due(attempt.step):
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
            movements = moved_buffers.in_float32(recording, self._models, still, self.guard)
        self._budget.spent(movements.seconds)
        attempt.judging_s += movements.seconds
        for name, movement in movements.of.items():
            self._read(name, half[name], movement, attempt.step)
        found = [name for name in movements.of if _is_lost(self._readings[name], half[name].dtype)]
        if found:
            self._tell(attempt, recording, found, half)

    def _half(self) -> list[tuple[str, Tensor]]:
        return [
            (".".join(filter(None, (module, name))), buffer)
            for module, name, buffer in self._models.buffers()
            if buffer.dtype in HALF and type(buffer) is Tensor and buffer.numel()
        ]

    def _read(self, name: str, buffer: Tensor, movement: Movement, step: int) -> None:
        heading = movement.moved / movement.follows
        self._readings[name] = [*self._readings[name], _Reading(step, buffer.detach().float(), heading)][-READINGS:]

    def _tell(self, attempt: StepAttempt, recording: TapedStep, names: list[str], half: dict[str, Tensor]) -> None:
        self._told.update(names)
        found = [_described(name, half[name].dtype, self._readings.pop(name)) for name in names]
        with self._cycle.inside(State.JUDGING):
            bad = Verdict(Trigger.BUFFER_STANDS_STILL, Symptom(), {"still": found})
            self._incidents.judge(attempt, bad, recording)


def _stands_still(buffer: Tensor, step: TapedStep) -> bool:
    """Whether nearly all of a buffer is as it was when the step began; waits for the device."""
    before = step.state.at_start(buffer)
    return before is not None and float((before == buffer).float().mean()) >= _MOST


def _is_lost(readings: list[_Reading], dtype: torch.dtype) -> bool:
    return len(readings) == READINGS and float(_far_off(readings, dtype).float().mean()) >= _MOST / 2


def _far_off(readings: list[_Reading], dtype: torch.dtype) -> Tensor:
    """The elements that float32 moves the same way each time, and that are far from where they are heading."""
    headings = torch.stack([each.heading for each in readings])
    same_way = (headings > 0).all(0) | (headings < 0).all(0)
    value = readings[-1].before.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    return same_way & (headings.mean(0).abs() > _FAR * value)


def _described(name: str, dtype: torch.dtype, readings: list[_Reading]) -> dict[str, Any]:
    far = _far_off(readings, dtype)
    heading = torch.stack([each.heading for each in readings]).mean(0)
    return {
        "name": name,
        "module": name.rpartition(".")[0],
        "dtype": dtype_name(dtype),
        "since": readings[0].step,
        "last": readings[-1].step,
        "share": float(far.float().mean()),
        "value": float(readings[-1].before[far].abs().mean()),
        "off_by": float(heading[far].abs().mean()),
    }
