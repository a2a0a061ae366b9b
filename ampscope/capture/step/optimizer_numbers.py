"""The optimizers of a run: which belong to it, their numbers, and the step each of them is at."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView


class OptimizerNumbers:
    """Numbers optimizers in the order in which they first step, and counts their steps.

    Args:
        models: The watched models.
        next_step: Where a resumed run goes on, by number.
        renewed: Called when the models hold other parameters than before.
        guard: Catches faults in looking at an optimizer.
    """

    def __init__(self, models: Models, next_step: dict[int, int], renewed: Callable[[], None], guard: Guard) -> None:
        self._models = models
        self._next_step = dict(next_step)
        self._renewed = renewed
        self._guard = guard
        self._owned: dict[int, bool] = {}
        self._indices: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._indices)

    def index_of(self, optimizer: Optimizer) -> int:
        """Number of an optimizer, in the order in which they first stepped."""
        return self._indices.setdefault(id(optimizer), len(self._indices))

    def step_of(self, optimizer: Optimizer | None) -> int:
        """Number of the step that ``optimizer`` (with None, the first) is working on."""
        return self._next_step.get(self._indices.get(id(optimizer), 0), 0)

    def stepped(self, index: int, step: int) -> None:
        """The optimizer with a number has made the attempt ``step``."""
        self._next_step[index] = step + 1

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of a watched model."""
        key = id(optimizer)
        if key not in self._owned:
            self._owned[key] = False
            with self._guard:
                if self._models.refresh():
                    self._renewed()
                self._owned[key] = self._models.owns(OptimizerView(optimizer).parameters)
        return self._owned[key]
