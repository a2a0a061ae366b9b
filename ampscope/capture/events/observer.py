"""The protocol of whoever is told what happens in a step."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer

from ampscope.capture.events.calls import BackwardCall, BareStep, JoinedScaler, ModuleCall, ScalerCall, StepStart
from ampscope.capture.events.open_step import EndedStep, StepAttempt
from ampscope.capture.events.run_end import RunEnd
from ampscope.capture.torch_support.guard import Guard


class StepObserver:
    """Is told what happens in a step; each event does nothing unless an observer has use for it.

    `ampscope.capture.step.observers` says who is told of what, in which order, and runs each under its own guard.
    """

    guard: Guard  #: catches the observer's faults, and is broken once it has caught one

    def step_began(self, start: StepStart) -> None:
        """The first watched forward of a step is about to run."""

    def call_began(self, call: ModuleCall) -> None:
        """A watched module is about to be called."""

    def call_ended(self, call: ModuleCall, result: Any) -> None:
        """The call has returned."""

    def call_lost(self, call: ModuleCall) -> None:
        """The call was left by an exception: it is no part of the step."""

    def backward_began(self, backward: BackwardCall) -> None:
        """A backward is about to run."""

    def backward_ended(self) -> None:
        """A backward has run."""

    def gradients_complete(self) -> None:
        """Nothing that follows in this step is ever replayed: unscaling, clipping, the optimizer."""

    def scaler_joined(self, joined: JoinedScaler) -> None:
        """The run has got a scaler."""

    def scaler_call_began(self, call: ScalerCall) -> None:
        """A method of a scaler is about to run."""

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """A scaler's method has run."""

    def scaler_call_lost(self) -> None:
        """A scaler's method was left by an exception, an optimizer's own perhaps."""

    def attempt_began(self, attempt: StepAttempt) -> None:
        """An optimizer is about to be stepped, or skipped."""

    def bare_step(self, bare: BareStep) -> None:
        """An optimizer steps without a scaler, or past it."""

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """An optimizer is about to change its parameters."""

    def foreign_step(self, optimizer: Optimizer) -> None:
        """An optimizer that holds no watched parameter steps while a step of the watched model is open."""

    def region_switched_off(self, device: str) -> None:
        """The loop has made an autocast region for a kind of device, which torch has switched off."""

    def step_ended(self, ended: EndedStep) -> None:
        """An attempt is over."""

    def scheduler_stepped(self, scheduler: Any) -> None:
        """A learning rate scheduler steps."""

    def abandoned(self, reason: str) -> None:
        """The step in progress is given up; an incident in it cannot be replayed."""

    def run_ended(self, end: RunEnd) -> None:
        """No further step will come: the scope is being closed."""
