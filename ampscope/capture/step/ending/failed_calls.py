"""Remembers the exception by which a step was left, and reports it where nothing came after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ampscope.capture.events.calls import BackwardCall, ModuleCall
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep
from ampscope.capture.record.run_recorder import Evidence, Recorder
from ampscope.capture.replay.results import ReplayResult
from ampscope.capture.step.ending.incidents import Incidents
from ampscope.capture.step.optimizer_numbers import OptimizerNumbers
from ampscope.capture.torch_support.calls import failed_call
from ampscope.capture.torch_support.calls.failed_call import FailedCall
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import Phase, ReplayStatus, Trigger

_OURS = "the step ended with an error, so there is no whole step to run again"


class FailedCalls(StepObserver):
    """What raised last. A loop that goes on, to a backward or to the end of a step, has got over it.

    Args:
        models: The watched models.
        recorder: Where an incident's row goes.
        incidents: Knows which step was told already.
        optimizers: Number the steps.
        guard: Catches faults of looking at an exception.
    """

    def __init__(
        self, models: Models, recorder: Recorder, incidents: Incidents, optimizers: OptimizerNumbers, guard: Guard
    ) -> None:
        self.guard = guard
        self._models = models
        self._recorder = recorder
        self._incidents = incidents
        self._optimizers = optimizers
        self._last: tuple[FailedCall, Phase] | None = None
        self._in_backward = False
        self._seen = 0  # ``id`` of the exception that was looked at last: it passes several of those who look

    def call_lost(self, _: ModuleCall) -> None:
        """A watched module raised."""
        self._note_passing(Phase.FORWARD)

    def function_raised(self, error: Exception, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A torch function that the loop called raised."""
        if id(error) == self._seen:
            return
        with self.guard:
            self._note(failed_call.of_function(error, func, args, kwargs), Phase.LOSS)

    def backward_began(self, _: BackwardCall) -> None:
        """The loop goes on."""
        self._last, self._in_backward = None, True

    def backward_ended(self) -> None:
        """It has returned."""
        self._in_backward = False

    def abandoned(self, _: str) -> None:
        """The step is given up; by an exception in its backward, where one is running."""
        if self._in_backward:
            self._in_backward = False
            self._note_passing(Phase.BACKWARD)

    def step_ended(self, _: EndedStep) -> None:
        """The loop goes on."""
        self._last = None

    def run_ended(self) -> None:
        """Nothing came after it."""
        last, self._last = self._last, None
        step = self._optimizers.step_of(None)
        if last is None or self._incidents.latest == (step, 0):
            return
        call, phase = last
        self._recorder.incident(
            Trigger.EXCEPTION,
            step=step,
            optimizer=0,
            loss=None,
            scale=None,
            outcome=ReplayResult(ReplayStatus.UNAVAILABLE, _OURS),
            evidence=Evidence(details={"exception": {**call.as_evidence(), "phase": phase}}),
        )

    def _note_passing(self, phase: Phase) -> None:
        """Looks at the exception that is being handled."""
        error = sys.exc_info()[1]
        self._seen = id(error)
        self._note(failed_call.of_error(error, self._models.names), phase)

    def _note(self, call: FailedCall | None, phase: Phase) -> None:
        self._last = (call, phase) if call is not None else None
