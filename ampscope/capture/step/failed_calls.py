"""Remembers the exception by which a step was left, and reports the one that ended the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.events import BackwardCall, EndedStep, ModuleCall, RunEnd, ScalerCall, ScalerMethod, StepObserver
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.torch_support import failed_call
from ampscope.capture.torch_support.failed_call import FailedCall
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import UserFrame
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Phase, ReplayStatus, Trigger

_OURS = "the step ended with an error, so there is no whole step to run again"


class _Raised(NamedTuple):
    """A call that raised."""

    call: FailedCall
    phase: Phase
    caller: UserFrame | None  #: whose code called it; None where that does not matter


class FailedCalls(StepObserver):
    """Remembers the call that raised last. A loop that goes on, to a backward or to the end of a step, has got over it.

    So has one of which is known that no error ended it. Where that is not known, because the run is closed later and by
    somebody else, what raised last counts, unless the function that called it runs on.

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
        self._last: _Raised | None = None
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
        """Forgets what raised before: the loop goes on."""
        self._last, self._in_backward = None, True

    def backward_ended(self) -> None:
        """Notes that the backward has returned."""
        self._in_backward = False

    def abandoned(self, _: str) -> None:
        """The step is given up; by an exception in its backward, where one is running."""
        if self._in_backward:
            self._in_backward = False
            self._note_passing(Phase.BACKWARD)

    def scaler_call_lost(self, call: ScalerCall) -> None:
        """A method of a scaler raised, or the optimizer in it; by its name an error tells from what stops a program."""
        self._note_passing(Phase.OPTIMIZER, on_purpose=RunEnd(sys.exc_info()[1]).failure is not None)
        if self._last is not None and call.method is ScalerMethod.STEP:
            held = OptimizerView(call.argument).parameters
            if held and all(each.grad is None for each in held):  # "No inf checks were recorded", or a step of nothing
                frozen = sum(not each.requires_grad for each in held)
                foreign = sum(id(each) not in self._models.parameters for each in held)
                failed = replace(self._last.call, parameters=len(held), frozen=frozen, foreign=foreign)
                self._last = self._last._replace(call=failed)

    def step_ended(self, _: EndedStep) -> None:
        """Forgets what raised before: the loop goes on."""
        self._last = None

    def run_ended(self, end: RunEnd) -> None:
        """Reports what ended the run, unless that is told as an incident of its step."""
        raised = self._ended_by(end)
        self._last = None
        step = self._optimizers.step_of(None)
        if raised is None or self._incidents.latest == (step, 0):
            return
        self._recorder.incident(
            Trigger.EXCEPTION,
            step=step,
            optimizer=0,
            loss=None,
            scale=None,
            outcome=ReplayResult(ReplayStatus.UNAVAILABLE, _OURS),
            evidence=Evidence(exception=replace(raised.call, phase=raised.phase)),
        )

    def _ended_by(self, end: RunEnd) -> _Raised | None:
        """Finds the call that ended the run with an error, as far as that is known; None where none did."""
        last = self._last
        if not end.is_known:
            return last if last is not None and not (last.caller is not None and last.caller.runs_on()) else None
        if end.failure is None:
            return None
        if last is not None and self._seen in map(id, end.reasons()):
            return last
        call = failed_call.of_error(end.failure, self._models.names, on_purpose=True)
        return _Raised(call, failed_call.phase_of(end.failure, self._models.names), None) if call is not None else None

    def _note_passing(self, phase: Phase, *, on_purpose: bool = False) -> None:
        """Looks at the exception that is being handled."""
        error = sys.exc_info()[1]
        self._seen = id(error)
        self._note(failed_call.of_error(error, self._models.names, on_purpose=on_purpose), phase)

    def _note(self, call: FailedCall | None, phase: Phase) -> None:
        self._last = _Raised(call, phase, UserFrame.now()) if call is not None else None
