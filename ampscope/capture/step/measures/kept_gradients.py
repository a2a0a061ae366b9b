"""Notices gradients that are never cleared: each step is made with the sum of all gradients so far."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.readback import Readback, Values
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.capture.usage.mistake import Mistake, ReportMistake
from ampscope.trace.vocabulary import Cause

#: Steps in a row after which it is told, at the run's end or before; in between, gradients are compared by value.
_ENOUGH, _LONG, _COMPARED = 8, 32, 6


@dataclass(slots=True)
class _Kept:
    """One gradient of an optimizer, as it was when the loop was last entitled to change it."""

    gradient: weakref.ref[Tensor]
    parameter: weakref.ref[Tensor]
    name: str
    first: int  #: the step that began with it
    place: Place | None
    version: int
    grew: bool = False  #: a backward has added to it since the step before
    steps: int = 0  #: made with it, without a line in between that changed it
    norm: Tensor | None = None  #: as the step that is compared left it
    stays: Tensor | None = None  #: whether it had the same values at the next backward, and others than zero

    def now(self) -> Tensor | None:
        """The gradient, where it is still the parameter's."""
        parameter, gradient = self.parameter(), self.gradient()
        return gradient if parameter is not None and parameter.grad is gradient else None


class KeptGradients:
    """Follows a gradient of each optimizer from step to step, until somebody clears it."""

    def __init__(self, models: Models, readback: Readback, report: ReportMistake) -> None:
        self._models = models
        self._readback = readback
        self._report = report
        self._followed: dict[int, _Kept] = {}  # by number of the optimizer
        self._cleared: set[int] = set()  # numbers of those that were cleared once, or told

    def backward_began(self) -> None:
        """Lets go of those that the loop has changed since the backward, or the step, before."""
        for number, kept in list(self._followed.items()):
            gradient = kept.now()
            if gradient is None or version_counter(gradient) != kept.version:
                self._let_go(number)
            elif kept.norm is not None and kept.stays is None:  # ``grad.data.zero_()`` leaves the counter as it is
                norm = torch.linalg.vector_norm(gradient)
                kept.stays = (norm == kept.norm) & (norm > 0)

    def backward_ended(self) -> None:
        """Takes down what it has added to."""
        for kept in self._followed.values():
            gradient = kept.now()
            if gradient is not None and version_counter(gradient) != kept.version:
                kept.grew, kept.version = True, version_counter(gradient)

    def step_ended(self, attempt: StepAttempt) -> None:
        """Counts a step made with what was never cleared."""
        if attempt.index in self._cleared or not isinstance(attempt.optimizer, Optimizer):
            return
        kept = self._followed.get(attempt.index)
        if not attempt.stepped or attempt.bad or (kept is not None and kept.now() is None):
            self._followed.pop(attempt.index, None)  # whoever skips a step need not clear what it was skipped for
        elif kept is None:
            self._follow(attempt)
        elif kept.grew and (gradient := kept.now()) is not None:
            kept.grew, kept.version, kept.steps = False, version_counter(gradient), kept.steps + 1
            if kept.steps == _COMPARED:
                kept.norm = torch.linalg.vector_norm(gradient.detach())
            if kept.steps == _LONG:
                self._tell(attempt.index, kept)

    def _follow(self, attempt: StepAttempt) -> None:
        if OptimizerView(attempt.optimizer).has_own_step:  # some are made for sums
            self._cleared.add(attempt.index)
            return
        for parameter, gradient in OptimizerView(attempt.optimizer).with_gradients:
            known = self._models.parameters.get(id(parameter))
            if known is not None and type(gradient) is Tensor and gradient.layout is torch.strided:
                both, version = (weakref.ref(gradient), weakref.ref(parameter)), version_counter(gradient)
                self._followed[attempt.index] = _Kept(*both, known[0], attempt.step, user_place(), version)
                return

    def run_ended(self) -> None:
        """Tells of what was not cleared to the end."""
        for number, kept in list(self._followed.items()):
            if kept.steps >= _ENOUGH:
                self._tell(number, kept)

    def _tell(self, number: int, kept: _Kept) -> None:
        self._let_go(number)
        self._readback.fetch({"stays": kept.stays}, lambda known: self._came(kept, known))

    def _came(self, kept: _Kept, known: Values) -> None:
        if known["stays"]:
            found = {"attempts": kept.steps, "parameters": [kept.name], "count": 1}
            self._report(Mistake(Cause.GRADIENTS_NOT_CLEARED, kept.place, kept.first, evidence=found))

    def _let_go(self, number: int) -> None:
        del self._followed[number]
        self._cleared.add(number)
