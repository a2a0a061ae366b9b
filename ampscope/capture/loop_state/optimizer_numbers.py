"""The optimizers of a run: which belong to it, their numbers, and the step each of them is at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import StepAttempt
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.modes import others_aside
from ampscope.capture.torch_support.optimizer_view import OptimizerView, is_optimizer, stand_in, steps_any

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(slots=True)
class _Known:
    """Holds what is known of one optimizer."""

    optimizer: Callable[[], Any]
    owned: bool | None = None  #: holds a parameter of a watched model; None before that was looked at
    index: int | None = None  #: its number; None before its first step
    through: Callable[[], Any] | None = None  #: gives the optimizer of torch's that steps where it is told to


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
        self._stepped: set[int] = set()  # ``id`` of those that have stepped since the latest step began
        self._since: set[int] = set()  # likewise, since all had
        self._nobody = False  # the loop was seen to update weights that no optimizer holds
        self._rests = False  # an optimizer holds them, and was not seen to step
        self._asked = 0  # whether there is any
        self._free, self._asked_free = False, 0  # no optimizer holds parameters of the models' own; likewise
        models.stand_ins.allowed = self._own_are_free

    def __len__(self) -> int:
        return len(self.by_number())

    def index_of(self, optimizer: Optimizer) -> int:
        """Number of an optimizer, in the order in which they first stepped.

        One that steps the weights of another goes on with that one's number and steps: a loop that makes itself a new
        optimizer is the same training. The number of one that is gone is free again.
        """
        known = self._of(optimizer)
        if known.index is None:
            known.index = self._taken_over(optimizer)
        return known.index

    def begins(self, handed: Any) -> tuple[Any, int, int]:
        """Who steps where a scaler has ``handed`` step, or the loop itself: that optimizer, its number, its step."""
        known = self._of(handed)
        optimizer = known.optimizer()
        index = self.index_of(optimizer) if known.index is None else known.index
        return optimizer, index, self._next_step.get(index, 0)

    def who_steps(self, handed: Any) -> Any:
        """The optimizer that steps where a scaler has ``handed`` step: that itself, or one of torch's behind it."""
        return self._of(handed).optimizer()

    def steps_for(self, attempt: StepAttempt, optimizer: Optimizer) -> bool:
        """Whether a step of ``optimizer`` is that of an attempt, whose own object was told to step, or asked to."""
        its, wanted = (set(map(id, OptimizerView(each).parameters)) for each in (optimizer, attempt.optimizer))
        if its.issuperset(wanted):
            handed, behind, norms = self._of(attempt.handed), self._of(optimizer), attempt.opened.norms
            norms[id(optimizer)] = norms.get(id(attempt.optimizer))
            handed.through, behind.index, handed.index = behind.optimizer, handed.index, None
            attempt.optimizer = optimizer
        return not its.isdisjoint(wanted)

    def _taken_over(self, optimizer: Optimizer) -> int:
        """The number of whoever has stepped any of the weights of ``optimizer`` so far; the next one without any."""
        weights = set(map(id, OptimizerView(optimizer).parameters))
        for number, other in sorted(self.by_number().items(), key=lambda each: each[0]):
            if not weights.isdisjoint(map(id, OptimizerView(other).parameters)):
                self._of(other).index = None
                return number
        return self._next_number()

    def _next_number(self) -> int:
        taken = self.by_number()
        return next(number for number in count() if number not in taken)

    def by_number(self) -> dict[int, Optimizer]:
        """The optimizers that have stepped and are still there."""
        alive: dict[int, Optimizer] = {}
        for known in self._known.values():
            if known.index is not None and (found := known.optimizer()) is not None:
                alive[known.index] = found
        return alive

    def of_weights(self, weights: list[Tensor], given: Mapping[str, Tensor] = NOTHING) -> tuple[Optimizer, int]:
        """The optimizer that steps any of ``weights``, with its number.

        A stand-in has the gradients where they are not the optimizer's yet, and where none has stepped so far.

        Args:
            weights: Some of its weights.
            given: Gradients that are not where a backward leaves them, by name of the parameter.
        """
        wanted = {id(weight) for weight in weights}
        gradients = {key: given[name] for key, (name, _) in self._models.parameters.items() if name in given}
        for number, optimizer in sorted(self.by_number().items(), key=lambda each: each[0]):
            if wanted & set(map(id, OptimizerView(optimizer).parameters)):
                return stand_in(OptimizerView(optimizer).parameters, gradients) if gradients else optimizer, number
        return stand_in(self._models.trained(), gradients), self._next_number()

    def nobody_steps(self, weights: list[Tensor]) -> bool:
        """Whether no optimizer holds any of ``weights``, so that it is the loop that updates them."""
        if self.by_number():
            return False
        if not self._nobody:
            self._asked += 1
            if not self._asked & (self._asked - 1):  # a look at all of the process's objects, so ever more rarely
                self._nobody = not steps_any(weights)
        return self._nobody

    def _own_are_free(self) -> bool:
        """Whether no optimizer holds a parameter of the models' own, for which leaves of the loop's may stand in."""
        own = [each for key, (_, each) in self._models.parameters.items() if key not in self._models.stand_ins.held]
        wanted = set(map(id, own))
        if any(wanted & set(map(id, OptimizerView(each).parameters)) for each in self.by_number().values()):
            return False
        if not self._free:
            self._asked_free += 1
            if not self._asked_free & (self._asked_free - 1):  # as above
                self._free = not steps_any(own)
        return self._free

    def rest(self) -> None:
        """None steps, whoever holds the weights: the loop was seen to move them by itself, step after step."""
        self._nobody = self._rests = True

    def about_to_step(self, optimizer: Optimizer) -> None:
        """One of the run's steps: where it was taken for one that does not, the loop had climbed, and came back."""
        if self._rests:
            self._nobody = self._rests = False
            self.index_of(optimizer)

    def step_at(self, number: int) -> int:
        """Number of the step that the optimizer with a number is working on."""
        return self._next_step.get(number, 0)

    def step_of(self, optimizer: Optimizer | None) -> int:
        """Number of the step that ``optimizer`` (with None, the first) is working on."""
        return self._next_step.get(0 if optimizer is None else self._of(optimizer).index or 0, 0)

    def stepped(self, attempt: StepAttempt, *, first: bool) -> None:
        """An attempt is over, the ``first`` of its step."""
        self._next_step[attempt.index] = attempt.step + 1
        self._stepped = {*(() if first else self._stepped), id(attempt.optimizer)}
        self._since.add(id(attempt.optimizer))

    def all_have_stepped(self, *, may_be_more: bool) -> bool:
        """Whether each has stepped since that was so last: none is to step what has been computed so far.

        Args:
            may_be_more: Another may show up yet, unless those that have stepped hold all that is trained.
        """
        known = self.by_number().values()
        if not self._since.issuperset(map(id, known)):
            return False
        if may_be_more and known:
            held = {id(parameter) for optimizer in known for parameter in OptimizerView(optimizer).parameters}
            if not held.issuperset(id(each) for each in self._models.trained()):
                return False
        self._since.clear()
        return True

    def comes_again(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps, with gradients, although nothing has begun a step since its last one.

        Asked where no step is open. One of several that share a backward comes when another has ended the step.
        """
        again = not self._stepped or id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))
        return again and bool(OptimizerView(optimizer).gradients)

    def look_again(self) -> None:
        """The models hold other parameters than before: an optimizer that had none of them may have some now."""
        for known in self._known.values():
            known.owned = known.owned or None

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of a watched model."""
        known = self._of(optimizer)
        if known.owned:
            return True
        view = OptimizerView(known.optimizer())
        if self._models.stand_ins.take_up(view.parameters):
            known.owned = None
        if known.owned is None:
            known.owned = False
            with others_aside(), self._guard:
                if self._models.refresh():
                    self._renewed()
                known.owned = self._models.owns(view.parameters)
        return known.owned

    def _of(self, optimizer: Optimizer) -> _Known:
        """Returns what is known of an optimizer; another one may have got the ``id`` of one that is gone."""
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = _Known(_reference(optimizer))
            if not (is_optimizer(optimizer) or OptimizerView(optimizer).groups):  # it tells nobody what it steps
                everything = stand_in(self._models.trained())
                known.through = lambda: everything
        through = known.through() if known.through is not None else None
        return known if through is None else self._of(through)


def _reference(optimizer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # its class has slots, and none for this
        return lambda: optimizer
