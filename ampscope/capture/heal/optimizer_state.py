"""With healing, an optimizer's state is mended, or its eps replaced, before it steps and spoils weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.cures.optimizer_cures import surviving
from ampscope.capture.events import EndedStep, StepAttempt, StepObserver
from ampscope.capture.heal.healer import Healer
from ampscope.capture.heal.healing import TrainingChange
from ampscope.capture.heal.lasting_cure import LastingCure
from ampscope.capture.isolation import memory
from ampscope.capture.loop_state.held_state import HeldTensor, largest, optimizer_state
from ampscope.capture.loop_state.state_watch import SMALL, StateWatch, reach
from ampscope.capture.rerun.optimizer_rerun import Copied, StepAgain
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, is_optimizer
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.tracing.light_statistics import finite, measurable
from ampscope.trace.schema import CureKind, StateKind

#: How much further than any other element of its parameter one may move by a state that was mended.
FURTHER = 4.0
#: Copies that a step of one parameter takes: itself, its gradient, what it moves by, and what an optimizer keeps of it.
COPIES = 6
_NO_COPIES = "its optimizer cannot be stepped on copies first"
_NO_OTHER = "its optimizer does not begin without this state"


class Mended(NamedTuple):
    """Describes what was done to the state of a parameter."""

    parameter: str
    keys: Sequence[str]  #: of the state that was not finite
    elements: int  #: that were not finite; 0 where all of the state begins anew


def stepped_alone(optimizer: Optimizer, name: str, parameter: Tensor, *, filled: bool = False) -> StepAgain | str:
    """The step that an optimizer is about to make of one parameter, to be made on copies; else why that cannot be.

    Args:
        optimizer: The optimizer.
        name: Of the parameter.
        parameter: The parameter.
        filled: What is not finite takes the mean of the others.
    """
    if parameter.grad is None:
        return "it has no gradient in this step"
    if not (finite(parameter.detach()) and finite(parameter.grad)):
        return "its values or its gradients are not finite either"
    if not memory.fits(COPIES * parameter.numel() * parameter.element_size(), parameter.device):
        return "there is no room to step it on copies first"
    named = {name: cast(nn.Parameter, parameter)}
    if StepAgain.before_it(optimizer, named) is None:
        return _NO_COPIES
    return StepAgain(optimizer, named, _filled if filled else _cloned, None)


def mend_state(
    optimizer: Optimizer, owner: str, parameter: Tensor, parts: Sequence[HeldTensor], models: Models
) -> Mended | str:
    """Mends the state of a parameter: its bad elements, or else all of it; else tells why that cannot be.

    Args:
        optimizer: The optimizer, which is about to step.
        owner: The parameter's name.
        parameter: The parameter.
        parts: The state that is not finite.
        models: The watched models.
    """
    again = stepped_alone(optimizer, owner, parameter, filled=True)
    if isinstance(again, str):
        return again
    keys = [held.name for held in parts]
    for is_anew in (False, True):
        copied = again.made(models, adjust=partial(_without_state, owner if is_anew else ""))
        if copied is None:
            return _NO_OTHER if is_anew else _NO_COPIES
        if not copied.finite:
            continue
        if is_anew:
            del optimizer.state[parameter]
            return Mended(owner, keys, 0)
        if _keeps_pace(copied.parameters[owner].detach(), parameter.detach(), parts):
            elements = sum(int((~held.tensor.isfinite()).sum()) for held in parts)
            with torch.no_grad():
                for held in parts:
                    held.tensor.copy_(_filled(held.tensor))
            return Mended(owner, keys, elements)
    return "a step on copies was not finite with another state either"


def _without_state(owner: str, copied: Copied) -> None:
    if owner:
        del copied.optimizer.state[copied.parameters[owner]]


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _filled(tensor: Tensor) -> Tensor:
    """A copy in which elements that are not finite have the mean of the others."""
    copy = tensor.detach().clone()
    if not copy.is_floating_point():
        return copy
    is_finite = copy.isfinite()
    mean = torch.where(is_finite, copy, 0).sum(dtype=torch.float64) / is_finite.sum().clamp(min=1)
    return torch.where(is_finite, copy, mean.to(copy.dtype))


def _keeps_pace(after: Tensor, before: Tensor, parts: Sequence[HeldTensor]) -> bool:
    """Whether no element whose state was mended moves much further than those whose state was in order."""
    if any(held.tensor.shape != before.shape for held in parts):
        return False
    was_bad = torch.stack([~held.tensor.isfinite() for held in parts]).any(0)
    moved = (after - before).abs().float()
    if bool(was_bad.all()):
        return False
    return bool(moved[was_bad].max() <= FURTHER * moved[~was_bad].max())


def mending_told(done: Sequence[Mended]) -> str:
    """Says in a clause what was done to the state of parameters."""
    return "; ".join(_clauses(done))


def _clauses(done: Sequence[Mended]) -> Iterator[str]:
    elements = sum(each.elements for each in done)
    if elements:
        where = state_named([f"{' and '.join(each.keys)} of {each.parameter}" for each in done if each.elements])
        count = "one element that was not finite has" if elements == 1 else f"{elements} that were not finite have"
        yield f"in {where} {count} the mean of the others"
    if anew := [each.parameter for each in done if not each.elements]:
        yield f"the optimizer's state of {state_named(anew)} begins anew, for it was not finite"


def state_named(names: Sequence[str]) -> str:
    """Names, as a user would say them."""
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


class SurvivingEps(LastingCure):
    """Another eps in the groups of an optimizer whose own is zero in the dtype of their parameters.

    Args:
        optimizer: The optimizer.
        instead: What takes the place of each eps.
    """

    kind = CureKind.FORM
    by_finiteness = False

    def __init__(self, optimizer: Optimizer, instead: Mapping[float, float]) -> None:
        self._optimizer = optimizer
        self._instead = dict(instead)
        self._was: list[Any] = []  # the eps of each group

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        each = ", ".join(f"{eps:g} instead of {was:g}" for was, eps in self._instead.items())
        return f"the eps of {type(self._optimizer).__name__} {each}, which is zero in the dtype of its parameters"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"torch.optim.{type(self._optimizer).__name__}(..., eps={max(self._instead.values()):g})"

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        return {"eps": [[was, eps] for was, eps in self._instead.items()]}

    def change(self) -> ReplayChange:
        """See `LastingCure.change`: a replay makes no step of an optimizer."""
        return ReplayChange()

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return ReplayChange()

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        self._was = OptimizerView(self._optimizer).adjust("eps", lambda eps: self._instead.get(eps, eps))

    def lift(self) -> None:
        """See `LastingCure.lift`; an eps that the loop has set since stays. Loading a state makes other groups."""
        before = iter(self._was)
        OptimizerView(self._optimizer).adjust("eps", lambda eps: self._given_back(eps, next(before, eps)))
        self._was.clear()

    def _given_back(self, eps: Any, was: Any) -> Any:
        return was if self._instead.get(was) == eps else eps


def loses_eps(optimizer: Optimizer) -> dict[float, float]:
    """Each eps that is zero in the dtype of its group, with the one that survives there; reads no tensor."""
    found = ((eps, surviving(eps, dtype)) for eps, dtype in OptimizerView(optimizer).epsilons)
    return {was: eps for was, eps in found if eps is not None}


def eps_cure(optimizer: Optimizer, instead: Mapping[float, float], models: Models) -> SurvivingEps | str | None:
    """Finds the eps that keeps an optimizer's coming step finite; None where it is finite anyway, else why none does.

    Args:
        optimizer: Its gradients are finite.
        instead: See `loses_eps`.
        models: The watched models.
    """
    parameters = dict(_stepped(optimizer, models))
    again = StepAgain.before_it(optimizer, parameters)
    largest = sum(each.numel() * each.element_size() for each in parameters.values())
    if again is None or not memory.fits(COPIES * largest, models.main_device()):
        return "it cannot be stepped on copies first"
    if _is_finite(again.made(models)):
        return None
    if _is_finite(again.made(models, adjust=lambda copied: copied.adjust("eps", lambda eps: instead.get(eps, eps)))):
        return SurvivingEps(optimizer, instead)
    return "its step is not finite with another one either"


def _is_finite(copied: Copied | None) -> bool:
    return copied is not None and copied.finite


def _stepped(optimizer: Optimizer, models: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a step writes, by qualified name."""
    for parameter, _ in OptimizerView(optimizer).with_gradients:
        if id(parameter) in models.parameters:
            yield models.parameters[id(parameter)][0], cast(nn.Parameter, parameter)


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
            self._healer.leave_out(attempt, _OVERFLOWS.format(state_named([each.key for each in bad])))
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
        instead = loses_eps(attempt.optimizer)
        cure = eps_cure(attempt.optimizer, instead, self._models) if instead else None
        if isinstance(cure, str):
            self._healer.log.declined(attempt.step, f"{_LOST_EPS.format(type(attempt.optimizer).__name__)}; {cure}")
        elif cure is not None:
            self._healer.keep(cure, attempt)

    def step_ended(self, ended: EndedStep) -> None:
        """Notes the change counters of the optimizer's state as its own step has left it."""
        if is_optimizer(ended.attempt.optimizer):
            self._left[ended.attempt.index] = _counters(ended.attempt.optimizer)

    def _bad_state(self, attempt: StepAttempt) -> list[HeldTensor]:
        """The state that is not finite; waits for the device."""
        held = list(optimizer_state(attempt.optimizer, self._models))
        sizes = Parcel(dict(zip(map(str, range(len(held))), largest([each.tensor for each in held]), strict=True)))
        known = sizes.values().values()
        return [each for each, size in zip(held, known, strict=True) if not math.isfinite(size or 0.0)]

    def _lasting(self, attempt: StepAttempt, bad: Sequence[HeldTensor]) -> list[HeldTensor]:
        """State that a step leaves not finite: a running minimum, say, begins at infinity, and is finite after one."""
        parameters = dict(self._models.parameters.values())
        after = {owner: self._stepped(attempt, owner, parameters[owner]) for owner in {held.owner for held in bad}}
        well = {owner for owner, copied in after.items() if copied is not None and copied.finite}
        return [held for held in bad if held.owner not in well]

    def _mend(self, attempt: StepAttempt, bad: Sequence[HeldTensor]) -> None:
        """Mends what can be, and tells of it."""
        parameters = dict(self._models.parameters.values())
        done: list[Mended] = []
        for owner in dict.fromkeys(held.owner for held in bad):
            parts = [held for held in bad if held.owner == owner]
            mended = mend_state(attempt.optimizer, owner, parameters[owner], parts, self._models)
            if isinstance(mended, str):
                keys = " and ".join(held.name for held in parts)
                self._healer.log.declined(attempt.step, f"{keys} of {owner} cannot be mended: {mended}")
                self._state.suspected.add(attempt.index)
            else:
                done.append(mended)
        if done:
            names, detail = [each.parameter for each in done], {"mended": [each._asdict() for each in done]}
            self._healer.log.made(
                TrainingChange(attempt.step, attempt.index, CureKind.STATE, mending_told(done), names, detail=detail)
            )

    # -- squares that overflow ----------------------------------------------------------------------------------

    def _overflowing(self, attempt: StepAttempt) -> list[HeldTensor]:
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

    def _foreseen(self, attempt: StepAttempt, name: str, parameter: Tensor) -> Iterator[HeldTensor]:
        """Yields a parameter's weight and state, as far as a step on copies leaves them not finite."""
        copied = self._stepped(attempt, name, parameter)
        if copied is None:
            return
        copy = copied.parameters[name]
        if not finite(copy.detach()):
            yield HeldTensor(StateKind.WEIGHT, name, "", copy.detach())
        for key, value in copied.optimizer.state[copy].items():
            if isinstance(value, Tensor) and not finite(value):
                yield HeldTensor(StateKind.OPTIMIZER, str(key), name, value)

    def _stepped(self, attempt: StepAttempt, name: str, parameter: Tensor) -> Copied | None:
        """Makes the optimizer's step on copies of a parameter and its state; None where that cannot be done."""
        again = stepped_alone(attempt.optimizer, name, parameter)
        return None if isinstance(again, str) else again.made(self._models)


def _counters(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Returns the ``id`` and the change counter of each tensor that an optimizer keeps."""
    states = [state.values() for state in optimizer.state.values() if type(state) is dict]
    return [(id(value), version_counter(value)) for state in states for value in state if type(value) is Tensor]
