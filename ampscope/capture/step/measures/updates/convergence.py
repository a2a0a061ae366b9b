"""Whether a training has come to its end, as far as a few looks at its loss and its gradients' norm tell."""

from __future__ import annotations

import math

from ampscope.capture.events.open_step import StepAttempt

#: A training has come to its end where gradients and loss are smaller than they were by these factors,
_SMALL, _FALLEN = 0.05, 0.2
#: or where gradients are smaller by this one, and the loss has fallen by this share of its whole way at most.
_SMALLER, _FLAT = 0.5, 0.02


class Convergence:
    """The losses and norms that were seen at looks."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._norm = self._largest = 0.0

    def look(self, attempt: StepAttempt) -> None:
        """Takes down what is known of a step; waits for the device."""
        norm, loss = attempt.norm, attempt.opened.mean_loss()
        if norm is None:
            norm = attempt.opened.norms.get(id(attempt.optimizer))
        self._norm = float(norm) if norm is not None else math.nan
        self._largest = max(self._largest, self._norm)
        if loss is not None and math.isfinite(value := float(loss)):
            self._losses.append((attempt.step, value))

    def reached(self, since: int) -> bool:
        """Whether gradients and loss are small, or gradients are smaller and the loss has not fallen since a step."""
        losses = [loss for _, loss in self._losses]
        latest = [loss for step, loss in self._losses if step >= since]
        if not latest:
            return False
        if self._norm < _SMALL * self._largest and latest[-1] < _FALLEN * max(losses):
            return True
        half = max(1, len(latest) // 2)
        fallen = (sum(latest[:half]) - sum(latest[-half:])) / half
        return self._norm < _SMALLER * self._largest and fallen < _FLAT * (max(losses) - min(losses))
