"""The optimizers of a run: which belong to it, their numbers, and the step each of them is at."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView


@dataclass(slots=True)
class _Known:
    """What is known of one optimizer."""

    optimizer: weakref.ref[Optimizer]
    owned: bool | None = None  #: holds a parameter of a watched model; None before that was looked at
    index: int | None = None  #: its number; None before its first step


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
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        return len(self._numbers())

    def index_of(self, optimizer: Optimizer) -> int:
        """Number of an optimizer, in the order in which they first stepped; that of one that is gone is free again."""
        known = self._of(optimizer)
        if known.index is None:
            taken = self._numbers()
            known.index = next(number for number in count() if number not in taken)
        return known.index

    def _numbers(self) -> set[int]:
        alive = (known for known in self._known.values() if known.optimizer() is not None)
        return {known.index for known in alive if known.index is not None}

    def step_of(self, optimizer: Optimizer | None) -> int:
        """Number of the step that ``optimizer`` (with None, the first) is working on."""
        index = self._of(optimizer).index if optimizer is not None else 0
        return self._next_step.get(index or 0, 0)

    def stepped(self, index: int, step: int) -> None:
        """The optimizer with a number has made the attempt ``step``."""
        self._next_step[index] = step + 1

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of a watched model."""
        known = self._of(optimizer)
        if known.owned is None:
            known.owned = False
            with self._guard:
                if self._models.refresh():
                    self._renewed()
                known.owned = self._models.owns(OptimizerView(optimizer).parameters)
        return known.owned

    def _of(self, optimizer: Optimizer) -> _Known:
        """What is known of an optimizer; another one may have got the ``id`` of one that is gone."""
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = _Known(weakref.ref(optimizer))
        return known
