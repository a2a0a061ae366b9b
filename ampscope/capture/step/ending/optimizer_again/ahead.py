"""With healing: an optimizer is looked at before it steps where its state, or its step, may not be finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep, StepAttempt
from ampscope.capture.heal.healer import Healer
from ampscope.capture.heal.told import Change
from ampscope.capture.step.ending.optimizer_again.mending import Mended, mend, named, stepped_alone, told
from ampscope.capture.step.measures.state.held import Held, largest, optimizer_state
from ampscope.capture.step.measures.state.state_watch import SMALL, StateWatch, reach
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, is_optimizer
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.tracing.statistics.stats import finite
from ampscope.trace.schema import CureKind, StateKind

_OVERFLOWS = "left out, for its optimizer would make {} not finite of finite gradients"


class Ahead(StepObserver):
    """Mends the state of an optimizer, or has its step left out, before that makes the weights non-finite.

    Nothing is read before a good step: the tensors' change counters tell whether anybody but the optimizer has written
    into its state, and the norm of the gradients whether their squares may leave a dtype's range.

    Args:
        models: The watched models.
        state: Looks at the state from time to time, and reports what is bad.
        healer: Says what may be done, and tells of it.
    """

    def __init__(self, models: Models, state: StateWatch, healer: Healer) -> None:
        self.guard = healer.guard
        self._models = models
        self._state = state
        self._healer = healer
        self._left: dict[int, list[tuple[int, int]]] = {}  # by number of the optimizer, what its own step has written
        self._harmless: dict[int, float] = {}  # likewise, the largest norm at which no square overflowed

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks, where there is a reason to."""
        if attempt.left_out or not is_optimizer(attempt.optimizer):
            return
        if self._healer.allows(CureKind.STATE):
            self._look(attempt)
        if self._healer.allows(CureKind.LEFT_OUT) and (bad := self._overflowing(attempt)):
            self._state.foreseen(attempt, bad)
            self._healer.leave_out(attempt, _OVERFLOWS.format(named([each.key for each in bad])))

    def _look(self, attempt: StepAttempt) -> None:
        was_found = attempt.index in self._state.suspected
        if was_found or self._left.get(attempt.index) != _counters(attempt.optimizer):
            self._state.suspected.discard(attempt.index)
            bad = self._bad_state(attempt)
            if bad:
                self._state.found_before(attempt, bad)
                self._mend(attempt, bad)

    def step_ended(self, ended: EndedStep) -> None:
        """What is there now is what the optimizer has left."""
        if is_optimizer(ended.attempt.optimizer):
            self._left[ended.attempt.index] = _counters(ended.attempt.optimizer)

    def _bad_state(self, attempt: StepAttempt) -> list[Held]:
        """The state that is not finite; waits for the device."""
        held = list(optimizer_state(attempt.optimizer, self._models))
        sizes = Parcel(dict(zip(map(str, range(len(held))), largest([each.tensor for each in held]), strict=True)))
        known = sizes.values().values()
        return [each for each, size in zip(held, known, strict=True) if not math.isfinite(size or 0.0)]

    def _mend(self, attempt: StepAttempt, bad: Sequence[Held]) -> None:
        """Mends what can be, and tells of it."""
        parameters = dict(self._models.parameters.values())
        done: list[Mended] = []
        for owner in dict.fromkeys(held.owner for held in bad):
            parts = [held for held in bad if held.owner == owner]
            mended = mend(attempt.optimizer, owner, parameters[owner], parts, self._models)
            if isinstance(mended, str):
                keys = " and ".join(held.name for held in parts)
                self._healer.log.declined(attempt.step, f"{keys} of {owner} cannot be mended: {mended}")
                self._state.suspected.add(attempt.index)
            else:
                done.append(mended)
        if done:
            names, detail = [each.parameter for each in done], {"mended": [each._asdict() for each in done]}
            self._healer.log.made(Change(attempt.step, attempt.index, CureKind.STATE, told(done), names, detail=detail))

    # -- squares that overflow ----------------------------------------------------------------------------------

    def _overflowing(self, attempt: StepAttempt) -> list[Held]:
        """What the step leaves not finite on copies, where gradients are large enough for their squares to overflow."""
        known = attempt.opened.edited.get(id(attempt.optimizer), attempt.norm)
        size = attempt.opened.known_number(attempt.opened.norms.get(id(attempt.optimizer)) if known is None else known)
        if size is None or not size > max(SMALL, self._harmless.get(attempt.index, 0.0)):
            return []
        most = reach(attempt.optimizer, self._models)
        if size * size <= most:
            return []
        bad = [each for name, p in self._of(attempt) if _square(p) > most for each in self._foreseen(attempt, name, p)]
        if not bad and math.isfinite(size):  # else the norm itself has overflowed
            self._harmless[attempt.index] = size
        return bad

    def _of(self, attempt: StepAttempt) -> Iterator[tuple[str, Tensor]]:
        held = OptimizerView(attempt.optimizer).with_gradients
        return (self._models.parameters[id(p)] for p, _ in held if id(p) in self._models.parameters)

    def _foreseen(self, attempt: StepAttempt, name: str, parameter: Tensor) -> Iterator[Held]:
        """What the step leaves not finite of a parameter."""
        again = stepped_alone(attempt.optimizer, name, parameter)
        copied = None if isinstance(again, str) else again.copied()
        if isinstance(again, str) or copied is None or not again.play(copied, self._models, contextlib.nullcontext()):
            return
        copy = copied.parameters[name]
        if not finite(copy.detach()):
            yield Held(StateKind.WEIGHT, name, "", copy.detach())
        for key, value in copied.optimizer.state[copy].items():
            if isinstance(value, Tensor) and not finite(value):
                yield Held(StateKind.OPTIMIZER, str(key), name, value)


def _square(parameter: Tensor) -> float:
    """The largest square among its gradients, as a number of the host."""
    (largest_gradient,) = largest([parameter.grad]) if parameter.grad is not None else [torch.zeros(())]
    return float(largest_gradient) ** 2


def _counters(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Which tensors an optimizer keeps, and how often each was written."""
    states = [state.values() for state in optimizer.state.values() if type(state) is dict]
    return [(id(value), version_counter(value)) for state in states for value in state if type(value) is Tensor]
