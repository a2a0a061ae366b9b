"""Settles what becomes of a step's trace when the step ends: written, dropped, or made by a replay of compiled code."""

from __future__ import annotations

from ampscope.capture.budgets import TraceBudget
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep, StepAttempt
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.ending.incidents import Incidents
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models


class TraceEnding(StepObserver):
    """Settles the trace of each step.

    Args:
        models: The watched models.
        live: The trace of the step in progress.
        incidents: Takes an overflow that only the trace shows, and replays compiled steps.
        tape: What such a replay needs.
        budget: Which steps are traced.
        cycle: Where the step is.
        guard: Catches faults of the tracer.
    """

    def __init__(
        self,
        models: Models,
        live: LiveTrace,
        incidents: Incidents,
        tape: StepTape,
        budget: TraceBudget,
        cycle: StepCycle,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._models = models
        self._live = live
        self._incidents = incidents
        self._tape = tape
        self._budget = budget
        self._cycle = cycle

        self._replayed = False  # the step in progress

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Replays a compiled step that is to be recorded, as long as its weights are those that it ran with."""
        if not attempt.bad and not self._live.active and self._models.compiled:
            self._trace_by_replay(attempt, self._live.number)

    def step_ended(self, ended: EndedStep) -> None:
        """Keeps what is worth keeping of the step's trace."""
        attempt, number = ended.attempt, ended.number
        if attempt.bad:
            self._live.drop()
        elif self._live.active:
            absorbed = self._live.settle(attempt, number)
            if absorbed:
                self._incidents.absorbed(attempt, absorbed)
            elif self._live.collapsed:
                self._incidents.collapsed(attempt, self._live.collapsed)
        elif self._models.compiled:
            if attempt.by_hand:  # no optimizer has said that it would move the weights
                self._trace_by_replay(attempt, number)
            if self._replayed:
                self._budget.kept()
        self._replayed = False

    def _trace_by_replay(self, attempt: StepAttempt, number: int) -> None:
        if not self._replayed and self._budget.keeps_replay(number):
            self._replayed = True
            with self._cycle.inside(State.JUDGING):
                self._incidents.trace_by_replay(attempt, self._tape.recording())
