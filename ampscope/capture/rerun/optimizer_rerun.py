"""Runs an optimizer's step once more, on copies, to see which of its ops makes a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import StepAttempt, StepObserver
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.call_state import RandomState, random_state_kept
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, is_optimizer
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.tracing.light_statistics import finite, measurable
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import Node, Phase

#: Parameters that take part: a step that ruined one has mostly ruined others in the same way.
_MOST = 4
#: Elements of all of them.
_LARGEST = 1 << 24
#: Elements of weights and state up to which an optimizer is copied before each of its steps.
_SMALL = 1 << 18


class OptimizerBefore(NamedTuple):
    """An optimizer on copies of all that it writes, as it was before its step."""

    again: Any
    copies: dict[int, nn.Parameter]  #: by ``id`` of the parameter
    random: RandomState


class OptimizersBefore(StepObserver):
    """Copies optimizers whose step is somebody's own, before they step, as long as they are small.

    What such a step computes depends on more than its present state: on a count of steps, on what it refreshes now and
    then. The step of an optimizer of torch's shows again what it has made from what it has left.

    Args:
        models: The watched models.
        guard: Catches faults of copying.
    """

    def __init__(self, models: Models, guard: Guard) -> None:
        self.guard = guard
        self._models = models

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Copies the optimizer, if its step is its own and it is small."""
        view = OptimizerView(attempt.optimizer)
        if attempt.bad or not view.has_own_step:
            return
        parameters = [p for p in view.parameters if p.grad is not None]
        state = [view.state.get(p, {}) for p in parameters]
        size = sum(each.numel() for each in (*parameters, *tensor_tree.tensors(state)))
        ours = all(id(p) in self._models.parameters and _is_plain(p) for p in parameters)
        if size <= _SMALL and ours and view.is_plain:
            copies = {id(p): _copied(p, cloned) for p in parameters}
            random = RandomState.take(self._models.devices)
            attempt.before = OptimizerBefore(view.copied_onto(copies, cloned), copies, random)


class StepAgain:
    """A step of an optimizer that can be made again, as often as is wanted, each time on new copies.

    Args:
        source: The optimizer, from before its step or from after it.
        parameters: Those that take part, as ``source`` has them, by qualified name.
        prepared: Makes a copy of a tensor of the step.
        random: The generators as they were then; None where nothing is known of them.
    """

    def __init__(
        self,
        source: Any,
        parameters: Mapping[str, nn.Parameter],
        prepared: Callable[[Tensor], Tensor],
        random: RandomState | None,
    ) -> None:
        self.source = source
        self.parameters = parameters
        self._prepared = prepared
        self._random = random

    @staticmethod
    def of(attempt: StepAttempt, names: Sequence[str], models: Models) -> StepAgain | None:
        """Prepares an attempt's step to be made again, on the copies from before it, or on what is there now.

        On what is there now, what is not finite begins at zero: whatever the step itself makes of the gradients shows
        again, and what was bad before it does not. An optimizer of the user's is left alone if it holds more than
        numbers of its own.

        Args:
            attempt: Its optimizer has stepped; its gradients are still there.
            names: Qualified names of the parameters.
            models: The watched models.

        Returns:
            The step; None where it cannot be made.
        """
        if not is_optimizer(attempt.optimizer):
            return None  # the loop itself moves the weights
        before: OptimizerBefore | None = attempt.before
        if before is not None:
            parameters = {n: before.copies[id(p)] for n, p in models.parameters.values() if id(p) in before.copies}
            return StepAgain(before.again, parameters, cloned, before.random)
        named = [(n, p) for n, p in models.parameters.values() if n in names and _can_step(p)]
        wanted = {name: cast(nn.Parameter, parameter) for name, parameter in named[:_MOST]}
        plain = wanted and OptimizerView(attempt.optimizer).is_plain
        if not plain or sum(p.numel() for p in wanted.values()) > _LARGEST:
            return None
        return StepAgain(attempt.optimizer, wanted, _without_bad, None)

    @staticmethod
    def before_it(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> StepAgain | None:
        """The step that an optimizer is about to make, of all that it steps; None where it cannot be copied."""
        plain = bool(parameters) and all(map(_can_step, parameters.values())) and OptimizerView(optimizer).is_plain
        return StepAgain(optimizer, parameters, cloned, None) if plain else None

    def made(
        self,
        models: Models,
        *,
        dtype: torch.dtype | None = None,
        state: Callable[[Tensor], Tensor] | None = None,
        adjust: Callable[[Copied], object] = lambda _: None,
        observed: AbstractContextManager[object] | None = None,
    ) -> Copied | None:
        """Makes the step on new copies; None where that raises. Nothing of the training is different afterwards.

        Args:
            models: The watched models.
            dtype: Of all that is in half precision; None for its own.
            state: Makes a copy of a tensor of the optimizer's state, if otherwise than of a weight.
            adjust: Changes the copies before the step.
            observed: Is active while it steps.
        """

        def prepared(tensor: Tensor) -> Tensor:
            copy = self._prepared(tensor)
            return copy.to(dtype) if dtype is not None and copy.dtype in HALF else copy

        copies = {name: _copied(parameter, prepared) for name, parameter in self.parameters.items()}
        by_id = {id(parameter): copies[name] for name, parameter in self.parameters.items()}
        copied = Copied(OptimizerView(self.source).copied_onto(by_id, state or prepared), copies)
        _take_scale_out(copied)
        adjust(copied)
        return copied if self.again(copied, models, observed) else None

    def again(self, copied: Copied, models: Models, observed: AbstractContextManager[object] | None = None) -> bool:
        """Steps on copies, while ``observed``; returns whether that could be. The generators are as before after it."""
        step = type(copied.optimizer).step
        devices = self._random.devices if self._random is not None else models.devices
        with random_state_kept(devices):
            if self._random is not None:
                self._random.put_back()
            with Suppressed() as suppressed, observed or nullcontext():
                getattr(step, "__wrapped__", step)(copied.optimizer)
        return suppressed.error is None


class Copied(NamedTuple):
    """An optimizer on copies, and these by qualified name."""

    optimizer: Any
    parameters: Mapping[str, nn.Parameter]

    def adjust(self, name: str, change: Callable[[float], float]) -> None:
        """Changes an option of the optimizer; see `OptimizerView.adjust`."""
        OptimizerView(self.optimizer).adjust(name, change)

    @property
    def finite(self) -> bool:
        """Whether weights and state are."""
        written = (*self.parameters.values(), *tensor_tree.tensors(list(self.optimizer.state.values())))
        return all(finite(each.detach()) for each in written if measurable(each))


def traced(again: StepAgain, models: Models, tracer: Tracer) -> bool:
    """Steps once more under ``tracer``, which gets what comes out non-finite as sinks; returns whether anything did."""

    def named(copied: Copied) -> None:
        for name, copy in copied.parameters.items():
            _name(tracer, name, copy, copied.optimizer.state[copy])
        tracer.points.phase = Phase.OPTIMIZER

    copied = again.made(models, adjust=named, observed=tracer.active())
    if copied is None:
        return False
    state = copied.optimizer.state
    return sum(_mark(tracer, name, copy, state[copy]) for name, copy in copied.parameters.items()) > 0


def _take_scale_out(copied: Copied) -> None:
    """Gives the copies gradients free of the scale that a fused optimizer would take out itself."""
    scale = vars(copied.optimizer).pop("grad_scale", None)
    vars(copied.optimizer).pop("found_inf", None)
    for parameter in copied.parameters.values():
        if isinstance(scale, Tensor) and parameter.grad is not None:
            parameter.grad.div_(scale.to(parameter.grad.device))


def _can_step(parameter: Tensor) -> bool:
    return _is_plain(parameter) and parameter.grad is not None and finite(parameter.grad)


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.grad is not None and measurable(parameter.grad)


def _copied(parameter: Tensor, prepared: Callable[[Tensor], Tensor]) -> nn.Parameter:
    copy = nn.Parameter(prepared(parameter), requires_grad=True)
    copy.grad = prepared(parameter.grad) if parameter.grad is not None else None
    return copy


def cloned(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the step, as it is."""
    return tensor.detach().clone()


def _without_bad(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return torch.where(copy.isfinite(), copy, torch.zeros_like(copy)) if copy.is_floating_point() else copy


def _name(tracer: Tracer, name: str, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
    tracer.name_entry(parameter, Node.PARAMETER, name)
    if parameter.grad is not None:
        tracer.name_entry(parameter.grad, Node.INPUT, f"the gradient of {name}")
    for key, value in state.items():
        if isinstance(value, Tensor):
            tracer.name_entry(value, Node.INPUT, f"{key} of {name}")


def _mark(tracer: Tracer, name: str, parameter: nn.Parameter, state: Mapping[str, Any]) -> bool:
    module = name.rpartition(".")[0]
    bad = [(key, value) for key, value in state.items() if isinstance(value, Tensor) and not finite(value)]
    for key, value in bad:
        tracer.sink(value, Node.STATE_AFTER, f"{key} of {name}", module)
    if not finite(parameter):
        tracer.sink(parameter.detach(), Node.WEIGHT_AFTER, name, module)
        return True
    return bool(bad)
