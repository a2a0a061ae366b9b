"""With healing: an optimizer is looked at before it steps where its state, or its step, may not be finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import EndedStep, StepAttempt
from ampscope.capture.heal.healer import Healer
from ampscope.capture.heal.told import Change
from ampscope.capture.step.ending.optimizer_again import lost_eps
from ampscope.capture.step.ending.optimizer_again.mending import Mended, mend, named, stepped_alone, told
from ampscope.capture.step.ending.optimizer_again.rerun import Copied
from ampscope.capture.step.measures.state.held import Held, largest, optimizer_state
from ampscope.capture.step.measures.state.state_watch import SMALL, StateWatch, reach
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, is_optimizer
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.tracing.statistics.stats import finite, measurable
from ampscope.trace.schema import CureKind, StateKind

_LOST_EPS = "the eps of {} is zero in the dtype of its parameters"
OF_RANKS = "the optimizer's state is not finite, and on several ranks no rank changes its own"
_OVERFLOWS = "left out, for its optimizer would make {} not finite of finite gradients"


class Declined(StepObserver):
    """Among several ranks none changes its own optimizer's state: where that is not finite, it is said.

    Args:
        state: Looks at the state from time to time, and reports what is bad.
        healer: Tells of it.
    """

    def __init__(self, state: StateWatch, healer: Healer) -> None:
        self.guard = healer.guard
        self._state = state
        self._healer = healer

    def step_ended(self, ended: EndedStep) -> None:
        """Tells that state which the latest look found not finite is left as it is."""
        if ended.attempt.index in self._state.suspected:
            self._state.suspected.discard(ended.attempt.index)
            self._healer.log.declined(ended.attempt.step, OF_RANKS)


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
        if self._healer.allows(CureKind.FORM) and not attempt.bad:
            self._keep_eps(attempt)
        if self._healer.allows(CureKind.LEFT_OUT) and (bad := self._overflowing(attempt)):
            self._state.foreseen(attempt, bad)
            self._healer.leave_out(attempt, _OVERFLOWS.format(named([each.key for each in bad])))
            if not attempt.left_out:
                self._state.suspected.add(attempt.index)

    def _look(self, attempt: StepAttempt) -> None:
        was_found = attempt.index in self._state.suspected
        if was_found or self._left.get(attempt.index) != _counters(attempt.optimizer):
            self._state.suspected.discard(attempt.index)
            bad = self._lasting(attempt, self._bad_state(attempt))
            if bad:
                self._state.found_before(attempt, bad)
                self._mend(attempt, bad)

    def _keep_eps(self, attempt: StepAttempt) -> None:
        """Tries the step on copies, where an eps is zero in the dtype of what is to be stepped."""
        instead = lost_eps.lost(attempt.optimizer)
        cure = lost_eps.cure(attempt.optimizer, instead, self._models) if instead else None
        if isinstance(cure, str):
            self._healer.log.declined(attempt.step, f"{_LOST_EPS.format(type(attempt.optimizer).__name__)}; {cure}")
        elif cure is not None:
            self._healer.keep(cure, attempt)

    def step_ended(self, ended: EndedStep) -> None:
        """Notes the change counters of the optimizer's state as its own step has left it."""
        if is_optimizer(ended.attempt.optimizer):
            self._left[ended.attempt.index] = _counters(ended.attempt.optimizer)

    def _bad_state(self, attempt: StepAttempt) -> list[Held]:
        """The state that is not finite; waits for the device."""
        held = list(optimizer_state(attempt.optimizer, self._models))
        sizes = Parcel(dict(zip(map(str, range(len(held))), largest([each.tensor for each in held]), strict=True)))
        known = sizes.values().values()
        return [each for each, size in zip(held, known, strict=True) if not math.isfinite(size or 0.0)]

    def _lasting(self, attempt: StepAttempt, bad: Sequence[Held]) -> list[Held]:
        """State that a step leaves not finite: a running minimum, say, begins at infinity, and is finite after one."""
        parameters = dict(self._models.parameters.values())
        after = {owner: self._stepped(attempt, owner, parameters[owner]) for owner in {held.owner for held in bad}}
        well = {owner for owner, copied in after.items() if copied is not None and copied.finite}
        return [held for held in bad if held.owner not in well]

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
        """Returns what a step on copies leaves not finite, where the gradients' squares may overflow."""
        known = attempt.opened.edited.get(id(attempt.optimizer), attempt.norm)
        size = attempt.opened.known_number(attempt.opened.norms.get(id(attempt.optimizer)) if known is None else known)
        if size is None or not size > max(SMALL, self._harmless.get(attempt.index, 0.0)):
            return []
        most = reach(attempt.optimizer, self._models)
        if size * size <= most:
            return []
        large = ((name, p) for name, p, gradient in self._of(attempt) if float(*largest([gradient])) ** 2 > most)
        bad = [each for name, p in large for each in self._foreseen(attempt, name, p)]
        if not bad and math.isfinite(size):  # else the norm itself has overflowed
            self._harmless[attempt.index] = size
        return bad

    def _of(self, attempt: StepAttempt) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields the watched parameters that an attempt steps, with gradients, as far as these can be looked at."""
        for parameter, gradient in OptimizerView(attempt.optimizer).with_gradients:
            if id(parameter) in self._models.parameters and measurable(gradient):
                yield *self._models.parameters[id(parameter)], gradient

    def _foreseen(self, attempt: StepAttempt, name: str, parameter: Tensor) -> Iterator[Held]:
        """Yields a parameter's weight and state, as far as a step on copies leaves them not finite."""
        copied = self._stepped(attempt, name, parameter)
        if copied is None:
            return
        copy = copied.parameters[name]
        if not finite(copy.detach()):
            yield Held(StateKind.WEIGHT, name, "", copy.detach())
        for key, value in copied.optimizer.state[copy].items():
            if isinstance(value, Tensor) and not finite(value):
                yield Held(StateKind.OPTIMIZER, str(key), name, value)

    def _stepped(self, attempt: StepAttempt, name: str, parameter: Tensor) -> Copied | None:
        """Makes the optimizer's step on copies of a parameter and its state; None where that cannot be done."""
        again = stepped_alone(attempt.optimizer, name, parameter)
        if isinstance(again, str):
            return None
        copied = again.copied()
        return copied if again.play(copied, self._models) else None


def _counters(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Returns the ``id`` and the change counter of each tensor that an optimizer keeps."""
    states = [state.values() for state in optimizer.state.values() if type(state) is dict]
    return [(id(value), version_counter(value)) for state in states for value in state if type(value) is Tensor]
