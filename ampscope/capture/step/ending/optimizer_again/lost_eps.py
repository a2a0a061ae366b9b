"""With healing: an optimizer that is about to divide by an eps which its dtype makes zero gets one that survives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.heal.cures.lasting_cure import LastingCure
from ampscope.capture.replay import memory
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.step.ending.optimizer_again.cures import surviving
from ampscope.capture.step.ending.optimizer_again.mending import COPIES
from ampscope.capture.step.ending.optimizer_again.rerun import Copied, StepAgain
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.trace.schema import CureKind


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


def lost(optimizer: Optimizer) -> dict[float, float]:
    """Each eps that is zero in the dtype of its group, with the one that survives there; reads no tensor."""
    found = ((eps, surviving(eps, dtype)) for eps, dtype in OptimizerView(optimizer).epsilons)
    return {was: eps for was, eps in found if eps is not None}


def cure(optimizer: Optimizer, instead: Mapping[float, float], models: Models) -> SurvivingEps | str | None:
    """Finds the eps that keeps an optimizer's coming step finite; None where it is finite anyway, else why none does.

    Args:
        optimizer: Its gradients are finite.
        instead: See `lost`.
        models: The watched models.
    """
    parameters = dict(_stepped(optimizer, models))
    again = StepAgain.before_it(optimizer, parameters)
    largest = sum(each.numel() * each.element_size() for each in parameters.values())
    if again is None or not memory.fits(COPIES * largest, models.main_device()):
        return "it cannot be stepped on copies first"
    if _is_finite(again, again.copied(), models):
        return None
    other = again.copied()
    OptimizerView(other.optimizer).adjust("eps", lambda eps: instead.get(eps, eps))
    if _is_finite(again, other, models):
        return SurvivingEps(optimizer, instead)
    return "its step is not finite with another one either"


def _is_finite(again: StepAgain, copied: Copied, models: Models) -> bool:
    return again.play(copied, models, contextlib.nullcontext()) and copied.finite


def _stepped(optimizer: Optimizer, models: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a step writes, by qualified name."""
    for parameter, _ in OptimizerView(optimizer).with_gradients:
        if id(parameter) in models.parameters:
            yield models.parameters[id(parameter)][0], cast(nn.Parameter, parameter)
