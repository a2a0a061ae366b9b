"""How far a training has come: whether its gradients are as large as they were, or only rounding is left of them."""

from __future__ import annotations

import math

from torch import Tensor

from ampscope.capture.events.open_step import StepAttempt

#: Gradients that are smaller by this factor than those of an earlier look, at a loss that has fallen by the other one,
#: belong to a training that has come to its end.
_CONVERGED, _FALLEN = 0.05, 0.2


class Progress:
    """The largest gradients and the highest loss of the steps that were looked at.

    Attributes:
        largest: Norm of all gradients at any look.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._highest = 0.0  # loss, likewise

    def note(self, attempt: StepAttempt) -> float:
        """Notes the sizes of gradients and loss; returns the loss, NaN where it is not known. Waits for the device."""
        norm = norm_of(attempt)
        if norm is not None:
            self.saw(attempt.opened.number(norm))
        loss = attempt.opened.known_loss()
        if loss is None:
            mean = attempt.opened.mean_loss()
            loss = float(mean) if mean is not None else math.nan
        self._highest = max(self._highest, loss if math.isfinite(loss) else 0.0)
        return loss

    def saw(self, norm: float) -> None:
        """Notes the norm of all gradients."""
        self.largest = max(self.largest, norm)

    def has_ended(self, norm: float, loss: float) -> bool:
        """Whether a step with these gradients and this loss belongs to a training that has come to its end."""
        return norm < _CONVERGED * self.largest and loss < _FALLEN * self._highest


def norm_of(attempt: StepAttempt) -> Tensor | None:
    """The norm of all gradients of a step, on the device; None where nobody measured it."""
    return attempt.norm if attempt.norm is not None else attempt.opened.norms.get(id(attempt.optimizer))
