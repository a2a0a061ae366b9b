"""Notices buffers in half precision whose updates are rounded away: running statistics that never leave their start.

At a few steps the buffers are compared with what they were when the step began. Where one has not moved, two replays in
float32 tell where it should have moved, and towards what. One that has come to its end moves to and fro in float32; one
that is rounded away moves the same way each time, and is far from where it is heading.
"""

from __future__ import annotations

from torch import Tensor

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.replay.results import Symptom
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.ending.incidents import Incidents
from ampscope.capture.step.ending.looks import moved_buffers
from ampscope.capture.step.ending.verdict import Verdict
from ampscope.capture.step.measures.state.state_watch import is_due
from ampscope.capture.step.measures.stillness import MOST, READINGS, Stillness
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Trigger


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
            movements = moved_buffers.in_float32(recording, self._models, still, self.guard)
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
    return before is not None and float((before == buffer).float().mean()) >= MOST
