"""Trainings whose weights the loop keeps by itself: the model is only what they are put into, and never changes.

Each is a function of a model that gives what makes one step of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.integration.planted_faults.functional.loops import RATE, ROWS, Batch, loss_of

Weights = dict[str, Tensor]
Step = Callable[[Batch], object]


def _weights(model: nn.Module) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def _moved(weights: Weights, slopes: Weights) -> Weights:
    return {name: weight - RATE * slopes[name] for name, weight in weights.items()}


def value_and_slope(model: nn.Module) -> Step:
    weights = _weights(model)

    def step(data: Batch) -> Tensor:
        nonlocal weights
        x, y = data
        slopes, loss = torch.func.grad_and_value(lambda w: loss_of(functional_call(model, w, (x,)), y))(weights)
        weights = _moved(weights, slopes)
        return loss

    return step


def slope_alone(model: nn.Module) -> Step:
    """The loss is not asked for, nor do its inputs come by a closure."""
    weights = _weights(model)

    def of(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(functional_call(model, w, (x,)), y)

    def step(data: Batch) -> None:
        nonlocal weights
        slopes = torch.func.grad(of)(weights, *data)
        weights = {name: torch.add(weight, slopes[name], alpha=-RATE) for name, weight in weights.items()}

    return step


def with_momentum(model: nn.Module) -> Step:
    """The gradients of two halves, one after the other, and a velocity."""
    weights = _weights(model)
    velocity = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(data: Batch) -> None:
        nonlocal weights, velocity
        summed: Weights = {}
        for x, y in zip(data[0].chunk(2), data[1].chunk(2), strict=True):
            slopes = torch.func.grad(lambda w, x=x, y=y: loss_of(functional_call(model, w, (x,)), y))(weights)
            summed = {name: slope + summed.get(name, 0.0) for name, slope in slopes.items()}
        velocity = {name: 0.5 * each + summed[name] for name, each in velocity.items()}
        weights = _moved(weights, velocity)

    return step


def pulled_back(model: nn.Module) -> Step:
    weights = _weights(model)

    def step(data: Batch) -> None:
        nonlocal weights
        x, y = data
        loss, pull, *_ = torch.func.vjp(lambda w: loss_of(functional_call(model, w, (x,)), y), weights)
        weights = _moved(weights, pull(torch.ones_like(loss))[0])

    return step


def per_sample(model: nn.Module) -> Step:
    """Differential privacy: each row's gradient is clipped before they are averaged."""
    weights = _weights(model)

    def single(w: Weights, row: Tensor, wanted: Tensor) -> Tensor:
        return loss_of(functional_call(model, w, (row[None],)), wanted[None])

    def step(data: Batch) -> None:
        nonlocal weights
        slopes = torch.vmap(torch.func.grad(single), in_dims=(None, 0, 0))(weights, *data)
        norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
        clip = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        weights = _moved(weights, {n: torch.einsum("b,b...->...", clip, s) / ROWS for n, s in slopes.items()})

    return step


def written_in_place(model: nn.Module) -> Step:
    weights = _weights(model)

    def step(data: Batch) -> None:
        x, y = data
        slopes = torch.func.grad(lambda w: loss_of(functional_call(model, w, (x,)), y))(weights)
        for name, weight in weights.items():
            weight.sub_(RATE * slopes[name])

    return step


def asked_of_leaves(model: nn.Module) -> Step:
    """``torch.autograd.grad`` of weights that are leaves of their own."""
    weights = {name: weight.requires_grad_() for name, weight in _weights(model).items()}

    def step(data: Batch) -> Tensor:
        nonlocal weights
        x, y = data
        loss = loss_of(functional_call(model, weights, (x,)), y)
        slopes = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        weights = {name: each.detach().requires_grad_() for name, each in _moved(weights, slopes).items()}
        return loss.detach()

    return step


def evaluated(model: nn.Module) -> Step:
    """Between the steps the loop looks at its weights, at a moving average of them, and at rows one by one."""
    weights = _weights(model)
    average = dict(weights)

    @torch.no_grad()
    def look(x: Tensor) -> float:
        functional_call(model, average, (x,))
        return float(torch.vmap(lambda row: functional_call(model, weights, (row[None],))[0])(x).float().mean())

    def step(data: Batch) -> Tensor:
        nonlocal weights, average
        x, y = data
        slopes, loss = torch.func.grad_and_value(lambda w: loss_of(functional_call(model, w, (x,)), y))(weights)
        weights = _moved(weights, slopes)
        average = {name: torch.lerp(each, weights[name], 0.1) for name, each in average.items()}
        look(x)
        return loss

    return step


KEPT: tuple[Callable[[nn.Module], Step], ...] = (
    value_and_slope,
    slope_alone,
    with_momentum,
    pulled_back,
    per_sample,
    written_in_place,
    asked_of_leaves,
    evaluated,
)
