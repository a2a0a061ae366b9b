"""Leaves a step out: its optimizer does nothing, and neither gradients nor the loss scale change by that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampscope.capture.events.open_step import ScaleState, StepAttempt
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView


class LeavingOut:
    """Leaves steps out, and gives back gradients and the loss scale when they are over.

    Attributes:
        unproved: Whether a step is left out that no scaler skips, though nothing is proved on it.
        in_a_row: Steps, up to the latest, that were left out one after another.
    """

    def __init__(self, models: Models) -> None:
        self.unproved = True
        self.in_a_row = 0
        self._models = models
        self._taken: list[tuple[Tensor, Tensor]] = []  # parameters with the gradients that the loop may still read
        self._scaling: ScaleState | None = None  # before the scaler backs off
        self._overflowed = False  # another step of the same update did, and the scaler is right to back off

    def leave_out(self, attempt: StepAttempt, *, is_called: bool = False) -> str:
        """Leaves a step out, or tells why that cannot be.

        A scaler skips it by itself. Without one, its optimizer finds no gradients. Others of the same step go on, as
        where a scaler skips one of several.

        Args:
            attempt: The step.
            is_called: Its optimizer is called, though there be a scaler, for the gradients are finite.
        """
        if attempt.scaling is not None and not is_called:
            return ""
        view = OptimizerView(attempt.optimizer)
        if view.has_own_step or any(id(parameter) not in self._models.parameters for parameter in view.parameters):
            return "nobody knows what this optimizer does without gradients"
        if any(getattr(attempt.optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
            return "functions of the loop's own run with its optimizer and may need the gradients"
        self._taken = list(view.with_gradients)
        for parameter, _ in self._taken:
            parameter.grad = None
        return ""

    def ended(self, attempt: StepAttempt) -> None:
        """An attempt is over."""
        self.in_a_row = self.in_a_row + 1 if attempt.left_out else 0
        taken, self._taken = self._taken, []
        for parameter, gradient in taken:
            if parameter.grad is None:
                parameter.grad = gradient
        if attempt.scaling is not None and (attempt.bad or attempt.on_device):
            self._overflowed = self._overflowed or not attempt.left_out
            self._scaling = self._scaling or attempt.scaling

    def give_scale_back(self) -> None:
        """The scale is what it was, where the scaler has backed off because of what was left out.

        As the loop goes on, ends, or saves the scaler, and not before: a loop that knows a skipped step by the scale
        that falls finds it so.
        """
        before, self._scaling = self._scaling, None
        overflowed, self._overflowed = self._overflowed, False
        if before is not None and before.scale is not None and not overflowed:
            _undo_backoff(before.scaler, before.scale, before.tracker)


def _undo_backoff(scaler: Any, scale: Tensor, tracker: Tensor | None) -> None:
    """Gives a scaler its scale back, on its device; one that the loop has set otherwise stays."""
    now, count = torch_private.scaler_tensors(scaler)
    factor = torch_private.scaler_initial(scaler)["backoff_factor"]
    if now is None or factor is None or now.shape != scale.shape:
        return
    with torch.no_grad():
        backed_off = now == scale * factor
        if count is not None and tracker is not None:
            count.copy_(torch.where(backed_off & (count == 0), tracker, count))
        now.copy_(torch.where(backed_off, scale, now))
