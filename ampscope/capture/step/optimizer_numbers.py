"""The optimizers of a run: which belong to it, their numbers, and the step each of them is at."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, stand_in


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
        self._known: list[weakref.ref[Optimizer]] = []  # by number

    def __len__(self) -> int:
        return len(self._indices)

    def index_of(self, optimizer: Optimizer) -> int:
        """Number of an optimizer, in the order in which they first stepped."""
        if id(optimizer) not in self._indices:
            self._indices[id(optimizer)] = len(self._indices)
            self._known.append(weakref.ref(optimizer))
        return self._indices[id(optimizer)]

    def of_weights(self, weights: list[Tensor]) -> tuple[Optimizer, int]:
        """The optimizer that steps any of ``weights``, with its number; a stand-in for one that has not stepped yet."""
        wanted = {id(weight) for weight in weights}
        for number, known in enumerate(self._known):
            optimizer = known()
            if optimizer is not None and wanted & set(map(id, OptimizerView(optimizer).parameters)):
                return optimizer, number
        trained = (parameter for _, parameter in self._models.parameters.values() if parameter.requires_grad)
        return stand_in(trained), len(self._indices)

    def step_at(self, number: int) -> int:
        """Number of the step that the optimizer with a number is working on."""
        return self._next_step.get(number, 0)

    def step_of(self, optimizer: Optimizer | None) -> int:
        """Number of the step that ``optimizer`` (with None, the first) is working on."""
        return self.step_at(self._indices.get(id(optimizer), 0))

    def stepped(self, index: int, step: int) -> None:
        """The optimizer with a number has made the attempt ``step``."""
        self._next_step[index] = step + 1

    def look_again(self) -> None:
        """The models hold other parameters than before: an optimizer that had none of them may have some now."""
        self._owned = {key: True for key, owned in self._owned.items() if owned}

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
