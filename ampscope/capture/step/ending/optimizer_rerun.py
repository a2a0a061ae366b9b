"""Runs an optimizer's step once more, on copies, to see which of its ops makes a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls.random_state import RandomState, random_state_kept
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, is_optimizer
from ampscope.capture.tracing.statistics.stats import finite, measurable
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
        """Copies it."""
        view = OptimizerView(attempt.optimizer)
        if attempt.bad or not view.has_own_step:
            return
        parameters = [p for p in view.parameters if p.grad is not None]
        state = [view.optimizer.state.get(p, {}) for p in parameters]
        size = sum(each.numel() for each in (*parameters, *tensor_tree.tensors(state)))
        ours = all(id(p) in self._models.parameters and _is_plain(p) for p in parameters)
        if size <= _SMALL and ours and view.is_plain:
            copies = {id(p): _copied(p, _cloned) for p in parameters}
            random = RandomState.take(self._models.devices)
            attempt.before = OptimizerBefore(view.copied_onto(copies, _cloned), copies, random)


def rerun(attempt: StepAttempt, names: list[str], models: Models, tracer: Tracer) -> bool:
    """Steps once more under ``tracer``: on the copies from before, or on copies of what is there now.

    Args:
        attempt: Its optimizer has stepped; its gradients are still there.
        names: Qualified names of the parameters.
        models: The watched models.
        tracer: Gets what comes out non-finite as sinks.

    Returns:
        Whether anything came out non-finite; not where the loop itself moves the weights. Nothing of the training is
        different afterwards.
    """
    if not is_optimizer(attempt.optimizer):
        return False
    before: OptimizerBefore | None = attempt.before
    if before is None:
        return _rerun_now(attempt.optimizer, names, models, tracer)
    attempt.before = None
    wanted = [p for _, p in models.parameters.values() if id(p) in before.copies]
    with random_state_kept(before.random.devices):
        before.random.put_back()
        return _play(before.again, wanted, before.copies, models, tracer)


def _rerun_now(optimizer: Optimizer, names: list[str], models: Models, tracer: Tracer) -> bool:
    """Steps on copies of some parameters, with their present gradients and state, under ``tracer``.

    What is not finite begins at zero: whatever the step itself makes of the gradients shows again, and what was bad
    before it does not. An optimizer of the user's is left alone if it holds more than numbers of its own.
    """
    wanted = [p for name, p in models.parameters.values() if name in names and _can_step(p)][:_MOST]
    if not wanted or not OptimizerView(optimizer).is_plain or sum(p.numel() for p in wanted) > _LARGEST:
        return False
    copies = {id(p): _copied(p, _without_bad) for p in wanted}
    return _play(OptimizerView(optimizer).copied_onto(copies, _without_bad), wanted, copies, models, tracer)


def _play(
    again: Any, wanted: Sequence[Tensor], copies: Mapping[int, nn.Parameter], models: Models, tracer: Tracer
) -> bool:
    """Steps, and marks what came out bad; returns whether anything did."""
    for parameter in wanted:
        _name(tracer, models.parameters[id(parameter)][0], copies[id(parameter)], again.state[copies[id(parameter)]])
    step = type(again).step
    tracer.points.phase = Phase.OPTIMIZER
    with random_state_kept(models.devices), Suppressed() as suppressed, tracer.active():
        getattr(step, "__wrapped__", step)(again)
    if suppressed.error is not None:
        return False
    bad = False
    for parameter in wanted:
        copy, name = copies[id(parameter)], models.parameters[id(parameter)][0]
        bad |= _mark(tracer, name, copy, again.state[copy])
    return bad


def _can_step(parameter: Tensor) -> bool:
    return _is_plain(parameter) and parameter.grad is not None and finite(parameter.grad)


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.grad is not None and measurable(parameter.grad)


def _copied(parameter: Tensor, prepared: Callable[[Tensor], Tensor]) -> nn.Parameter:
    copy = nn.Parameter(prepared(parameter), requires_grad=True)
    copy.grad = _cloned(parameter.grad) if parameter.grad is not None else None
    return copy


def _cloned(tensor: Tensor) -> Tensor:
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
