"""Mends the state of an optimizer that is not finite, as a step on copies proves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.replay import memory
from ampscope.capture.step.ending.optimizer_again.rerun import StepAgain
from ampscope.capture.step.measures.state.held import Held
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.statistics.stats import finite

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


def mend(optimizer: Optimizer, owner: str, parameter: Tensor, parts: Sequence[Held], models: Models) -> Mended | str:
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
        copied = again.copied()
        if is_anew:
            del copied.optimizer.state[copied.parameters[owner]]
        if not again.play(copied, models):
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


def _keeps_pace(after: Tensor, before: Tensor, parts: Sequence[Held]) -> bool:
    """Whether no element whose state was mended moves much further than those whose state was in order."""
    if any(held.tensor.shape != before.shape for held in parts):
        return False
    was_bad = torch.stack([~held.tensor.isfinite() for held in parts]).any(0)
    moved = (after - before).abs().float()
    if bool(was_bad.all()):
        return False
    return bool(moved[was_bad].max() <= FURTHER * moved[~was_bad].max())


def told(done: Sequence[Mended]) -> str:
    """Says in a clause what was done to the state of parameters."""
    return "; ".join(_clauses(done))


def _clauses(done: Sequence[Mended]) -> Iterator[str]:
    elements = sum(each.elements for each in done)
    if elements:
        where = named([f"{' and '.join(each.keys)} of {each.parameter}" for each in done if each.elements])
        count = "one element that was not finite has" if elements == 1 else f"{elements} that were not finite have"
        yield f"in {where} {count} the mean of the others"
    if anew := [each.parameter for each in done if not each.elements]:
        yield f"the optimizer's state of {named(anew)} begins anew, for it was not finite"


def named(names: Sequence[str]) -> str:
    """Names, as a user would say them."""
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
