"""Runs an optimizer's step once more, on copies, to see which of its ops makes a value that is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.calls.call_state import random_state_kept
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.tracing.statistics.stats import finite, measurable
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import Node, Phase

#: Parameters that take part: a step that ruined one has mostly ruined others in the same way.
_MOST = 4
#: Elements of all of them.
_LARGEST = 1 << 24


def rerun(optimizer: Optimizer, names: list[str], models: Models, tracer: Tracer) -> bool:
    """Steps on copies of some parameters, with their present gradients and state, under ``tracer``.

    What is not finite begins at zero: whatever the step itself makes of the gradients shows again, and what was bad
    before it does not. An optimizer of the user's is left alone if it holds more than numbers of its own.

    Args:
        optimizer: Has stepped; its gradients are still there.
        names: Qualified names of the parameters.
        models: The watched models.
        tracer: Gets what comes out non-finite as sinks.

    Returns:
        Whether anything came out non-finite. Nothing of the training is different afterwards.
    """
    wanted = [p for name, p in models.parameters.values() if name in names and _can_step(p)][:_MOST]
    if not wanted or not OptimizerView(optimizer).is_plain or sum(p.numel() for p in wanted) > _LARGEST:
        return False
    copies = {id(p): _copied(p) for p in wanted}
    again = OptimizerView(optimizer).copied_onto(copies, _without_bad)
    for parameter in wanted:
        _name(tracer, models.parameters[id(parameter)][0], copies[id(parameter)], again.state[copies[id(parameter)]])
    step = type(optimizer).step
    tracer.points.phase = Phase.OPTIMIZER
    with random_state_kept(), Suppressed() as suppressed, tracer.active():
        getattr(step, "__wrapped__", step)(again)
    if suppressed.error is not None:
        return False
    bad = False
    for parameter in wanted:
        copy, name = copies[id(parameter)], models.parameters[id(parameter)][0]
        bad |= _mark(tracer, name, copy, again.state[copy])
    return bad


def _can_step(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return type(parameter) is nn.Parameter and gradient is not None and measurable(gradient) and finite(gradient)


def _copied(parameter: Tensor) -> nn.Parameter:
    copy = nn.Parameter(_without_bad(parameter), requires_grad=True)
    copy.grad = parameter.grad.detach().clone() if parameter.grad is not None else None
    return copy


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
