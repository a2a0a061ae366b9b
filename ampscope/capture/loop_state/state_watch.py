"""Looks from time to time, and when a run ends, whether its weights and its optimizers' state are finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import EndedStep, RunEnd, StepAttempt, StepObserver
from ampscope.capture.loop_state.held_state import (
    HeldTensor,
    StateHistory,
    StateLooks,
    WrittenState,
    largest,
    optimizer_state,
    weights,
)
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.readback import Readback, Values
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.user_line import program_line, user_place
from ampscope.capture.tracing.sites import dtype_name
from ampscope.trace.evidence import BadTensor
from ampscope.trace.schema import Looked, StateKind, Trigger
from ampscope.trace.vocabulary import LOOK_EVERY

#: Gradients up to this norm have squares that fit every dtype that is looked at.
SMALL = 255.0
#: What is smaller than this, float16 rounds to zero.
_LEAST_EPS = 2.0**-25


class BadState(NamedTuple):
    """Tensors that outlive a step and were found not to be finite."""

    held: list[tuple[HeldTensor, StateLooks]]
    optimizer: int  #: number of the optimizer that the steps are counted by
    step: int  #: after which they were looked at
    attempt: StepAttempt | None  #: that attempt, where it is the latest: its gradients are still there


class StateReport(Protocol):
    """Is told of state that turned bad."""

    def state_turned_bad(self, bad: BadState) -> None:
        """Some of it was found not to be finite."""


class KeptBeside(Protocol):
    """Knows tensors that a loop keeps of the watched models, and are none of theirs."""

    def held(self) -> Iterator[HeldTensor]:
        """Yields the tensors that are alive."""


class StateWatch(StepObserver):
    """Weights and optimizer state of a run; one look reads all of it once, so looks are rare.

    A weight that is not finite shows in the next loss. A moment that is not, does not: ``x / inf`` is 0, and the weight
    stands still for ever.

    Args:
        models: The watched models.
        optimizers: Which optimizers are the run's.
        written: Looks at buffers and carried tensors.
        averages: Knows what the loop keeps of the models beside them.
        history: Takes down what is seen.
        readback: Brings the values.
        report: Is told what was found not to be finite, once of each tensor.
        guard: Catches faults in looking.
    """

    def __init__(
        self,
        models: Models,
        optimizers: OptimizerNumbers,
        written: WrittenState,
        averages: KeptBeside,
        history: StateHistory,
        readback: Readback,
        report: StateReport,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._models = models
        self._optimizers = optimizers
        self._written = written
        self._averages = averages
        self._history = history
        self._readback = readback
        self._report = report
        self._ruined: set[int] = set()  # numbers of optimizers that took gradients which were not finite
        self._harmless: dict[int, float] = {}  # by number of the optimizer, the largest norm that was looked into
        self._once_finite: set[str] = set()  # names of what was
        self._finite_at: dict[int, int] = {}  # by number of the optimizer, the last step after which all was finite
        self.suspected: set[int] = set()  #: numbers of optimizers at which the latest look found what is not finite
        self._told_well: dict[int, int] = {}  # by number of the optimizer, its last step by numbers that are finite

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks at the numbers of the optimizer's groups: one that is NaN makes every weight so that it steps."""
        spoilt = OptimizerView(attempt.optimizer).spoilt_numbers
        if not spoilt:
            self._told_well[attempt.index] = attempt.step
        elif not attempt.left_out:
            bad = []
            for key, value, parameters in spoilt:
                owners = [known[0] for each in parameters if (known := self._models.parameters.get(id(each)))]
                held = torch.tensor(value)
                bad += [HeldTensor(StateKind.SETTING, key, owner, held, user_place()) for owner in owners[:1]]
            self._tell(bad, attempt.index, attempt.step, None, Looked.BEFORE, self._told_well.get(attempt.index))

    def step_ended(self, ended: EndedStep) -> None:
        """Looks, if the turn has come, and while no step is known that has ruined all of it."""
        attempt = ended.attempt
        if attempt.bad and attempt.stepped and not (attempt.left_out or _is_finite(attempt.norm)):
            self._ruined.add(attempt.index)
        if not attempt.stepped or attempt.bad or attempt.index in self._ruined:
            return
        due = attempt.before is not None or is_due(attempt.step)
        if due or may_divide_by_zero(attempt.optimizer) or self._is_suspicious(attempt):
            self.look(attempt)

    def _is_suspicious(self, attempt: StepAttempt) -> bool:
        """Whether squares of the gradients may leave the range of the state's dtype, as far as the host knows."""
        size = attempt.opened.known_number(attempt.norm)
        if size is None or size <= max(SMALL, self._harmless.get(attempt.index, 0.0)):
            return False
        if size * size <= reach(attempt.optimizer, self._models):
            return False
        self._harmless[attempt.index] = size  # it is told now, or does no harm
        return True

    def look(self, attempt: StepAttempt) -> None:
        """Looks at what the optimizer of ``attempt`` has written, without waiting for the device."""
        held = [*weights(self._models), *optimizer_state(attempt.optimizer, self._models), *self._averages.held()]
        values = dict(zip(map(str, range(len(held))), largest([each.tensor for each in held]), strict=True))
        self._readback.fetch(dict(values), lambda arrived: self._came(held, arrived, attempt))

    def _came(self, held: list[HeldTensor], values: Values, attempt: StepAttempt) -> None:
        bad = self._bad(held, values.values())
        if bad:
            self.suspected.add(attempt.index)
            self._tell(bad, attempt.index, attempt.step, attempt)
        else:
            self._finite_at[attempt.index] = attempt.step

    def _bad(self, held: Iterable[HeldTensor], values: Iterable[float | None]) -> list[HeldTensor]:
        """Returns what is not finite, by its largest magnitude; a carried tensor (a mask?) only if it once was."""
        bad = []
        for each, value in zip(held, values, strict=True):
            if math.isfinite(value or 0.0):
                self._once_finite.add(each.name)
            elif each.kind is not StateKind.CARRIED or each.name in self._once_finite:
                bad.append(each)
        return bad

    def _tell(
        self,
        bad: Iterable[HeldTensor],
        optimizer: int,
        step: int,
        attempt: StepAttempt | None,
        when: Looked = Looked.AFTER,
        finite_at: int | None = None,
    ) -> None:
        finite_at = self._finite_at.get(optimizer) if finite_at is None else finite_at
        noted = functools.partial(self._history.note_bad, step=step, finite_at=finite_at, when=when)
        new = [each for each in bad if noted(each)]
        seen = [(each, self._history.of(each)) for each in new]
        if new:
            self._report.state_turned_bad(
                BadState([(each, since) for each, since in seen if since is not None], optimizer, step, attempt)
            )

    def found_before(self, attempt: StepAttempt, bad: Iterable[HeldTensor]) -> None:
        """State was found not to be finite as its optimizer was about to step."""
        self._tell(bad, attempt.index, attempt.step, None, Looked.BEFORE)

    def foreseen(self, attempt: StepAttempt, bad: Iterable[HeldTensor]) -> None:
        """Reports what an optimizer's step on copies has left not finite; the optimizer will not make that step."""
        self._tell(bad, attempt.index, attempt.step, attempt, Looked.FORESEEN)

    def run_ended(self, _: RunEnd) -> None:
        """Looks at everything once more, at the weights also where their optimizer is gone; waits for the device."""
        optimizers: dict[int, Optimizer | None] = {0: None, **self._optimizers.by_number()}
        for number, optimizer in optimizers.items():
            if number in self._ruined:
                continue
            step = self._optimizers.step_at(number) - 1
            once = [*weights(self._models), *self._averages.held()] if not number else []
            held = [*once, *(optimizer_state(optimizer, self._models) if optimizer is not None else ())]
            bad = self._bad(held, map(float, largest([each.tensor for each in held])))
            self._tell([*bad, *(self._written.now_bad() if not number else ())], number, step, None)


def _is_finite(norm: Tensor | None) -> bool:
    """Whether the gradients of a bad step were finite; their norm has reached the host by then."""
    return norm is None or math.isfinite(float(norm))


def reach(optimizer: Optimizer, models: Models) -> float:
    """The largest number that all of an optimizer's state can hold."""
    held = optimizer_state(optimizer, models)
    return min((torch.finfo(each.tensor.dtype).max for each in held), default=math.inf)


def may_divide_by_zero(optimizer: Optimizer) -> bool:
    """Whether some group's eps is zero in the dtype of its parameters: a gradient of zero makes NaN of the weight."""
    for eps, dtype in OptimizerView(optimizer).epsilons:
        if eps < _LEAST_EPS and (eps == 0 or dtype is torch.float16):
            return True
    return False


def is_due(step: int) -> bool:
    """Whether all is looked at after this step."""
    return step % LOOK_EVERY == 0 or (step < LOOK_EVERY and step & (step - 1) == 0)


#: Tensors that are described; a run whose weights are all NaN has thousands.
MOST_NAMED = 16
#: What an incident is called where all that is bad is of one kind.
STATE_TRIGGERS: dict[StateKind, Trigger] = {
    StateKind.WEIGHT: Trigger.NONFINITE_WEIGHT,
    StateKind.BUFFER: Trigger.NONFINITE_BUFFER,
    StateKind.OPTIMIZER: Trigger.NONFINITE_STATE,
    StateKind.CARRIED: Trigger.NONFINITE_STATE,
    StateKind.SETTING: Trigger.NONFINITE_STATE,
}


def described_as_evidence(bad: BadState) -> tuple[BadTensor, ...]:
    """Each tensor for the evidence of an incident; waits for the device."""
    return tuple(_as_evidence(held, seen) for held, seen in bad.held[:MOST_NAMED])


def _as_evidence(held: HeldTensor, seen: StateLooks) -> BadTensor:
    nan, inf = _counts(local(held.tensor).detach())
    return BadTensor(
        kind=held.kind,
        name=held.name,
        owner=held.owner,
        module=held.module,
        dtype=dtype_name(held.tensor.dtype),
        finite_at=seen.finite_at,
        bad_at=seen.bad_at,
        when=seen.when,
        nan=nan,
        inf=inf,
        numel=held.tensor.numel(),
        source=program_line(held.place) if held.place is not None else None,
    )


def _counts(tensor: Tensor) -> tuple[int, int]:
    with torch.no_grad():
        return int(tensor.isnan().sum()), int(tensor.isinf().sum())
