"""Trainings that call their model through torch.func, or never call backward: the ways to compute gradients, by name.

Each way is a function of a model, its optimizer and a batch, and makes one step; `UPDATES` those without an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

WIDTH, ROWS = 8, 4
RATE = 0.01

Batch = tuple[Tensor, Tensor]
Way = Callable[[nn.Module, torch.optim.Optimizer, Batch], float]


class Part(nn.Module):
    """Computes what a test says."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, h: Tensor) -> Tensor:
        return self.call(h)


class Net(nn.Module):
    """Three layers; the first hands the batch on as it is."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.body.weight)
        self.part = Part(part)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.head(self.part(self.body(x)))
        return out


def batch() -> Batch:
    return torch.rand(ROWS, WIDTH) + 0.5, torch.ones(ROWS, 1)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(out.float(), y)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def _assign(model: nn.Module, optimizer: torch.optim.Optimizer, slopes: dict[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.grad = slopes[name]
    optimizer.step()


# -- with a backward ----------------------------------------------------------------------------------------------


def rows_by_vmap(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """The model sees one row at a time."""
    x, y = data
    return _step(optimizer, loss_of(torch.vmap(lambda row: model(row[None])[0])(x), y))


def nested_vmap(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """Pairs of rows, chunk by chunk."""
    x, y = data
    out = torch.vmap(torch.vmap(model, chunk_size=1))(x.reshape(2, -1, WIDTH))
    return _step(optimizer, loss_of(out.reshape(-1, 1), y))


def ensemble(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """Perturbed copies of the weights, all at once."""
    x, y = data
    stacked = {n: w + 0.01 * torch.randn(3, *w.shape) for n, w in model.named_parameters()}
    out = torch.vmap(lambda w: functional_call(model, w, (x,)))(stacked)
    return _step(optimizer, loss_of(out.mean(0), y))


def other_weights(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """Noise on the weights, and then the weights themselves."""
    x, y = data
    noisy = {n: w + 0.01 * torch.randn_like(w) for n, w in model.named_parameters()}
    return _step(optimizer, loss_of(functional_call(model, noisy, (x,)), y) + loss_of(model(x), y))


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """Meta-learning: the outer loss is that of weights that an inner step has moved."""
    x, y = data
    weights: dict[str, Tensor] = dict(model.named_parameters())
    inner = loss_of(functional_call(model, weights, (x,)), y)
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {n: w - RATE * slope for (n, w), slope in zip(weights.items(), slopes, strict=True)}
    return _step(optimizer, loss_of(functional_call(model, fast, (x,)), y))


def tasks_by_vmap(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """Meta-learning over a batch of tasks; the weights come in through a closure."""
    x, y = data
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def of(w: dict[str, Tensor], rows: Tensor, wanted: Tensor) -> Tensor:
        return loss_of(functional_call(model, w, (rows,)), wanted)

    def task(rows: Tensor, wanted: Tensor) -> Tensor:
        slopes = torch.func.grad(of)(weights, rows, wanted)
        return of({n: w - RATE * slopes[n] for n, w in weights.items()}, rows, wanted)

    losses = torch.vmap(task)(x.reshape(2, -1, WIDTH), y.reshape(2, -1, 1))
    return _step(optimizer, losses.mean())


def slope_penalty(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """The Jacobian with respect to the input is to be small."""
    x, y = data
    jacobian = torch.func.jacrev(lambda rows: model(rows).sum(0))(x)
    return _step(optimizer, loss_of(model(x), y) + 0.1 * jacobian.float().square().mean())


# -- gradients that no backward has left ----------------------------------------------------------------------------


def per_sample(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """Differential privacy: each row's gradient is clipped before they are averaged."""
    x, y = data

    def single(w: dict[str, Tensor], row: Tensor, wanted: Tensor) -> Tensor:
        return loss_of(functional_call(model, w, (row[None],)), wanted[None])

    slopes = torch.vmap(torch.func.grad(single), in_dims=(None, 0, 0))(_weights(model), x, y)
    norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
    clip = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    _assign(model, optimizer, {n: torch.einsum("b,b...->...", clip, slope) / ROWS for n, slope in slopes.items()})
    return 0.0


def value_and_slope(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    x, y = data
    of = torch.func.grad_and_value(lambda w: loss_of(functional_call(model, w, (x,)), y))
    slopes, loss = of(dict(model.named_parameters()))
    _assign(model, optimizer, slopes)
    return loss.item()


def pulled_back(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    x, y = data
    loss, pull, *_ = torch.func.vjp(lambda w: loss_of(functional_call(model, w, (x,)), y), _weights(model))
    (slopes,) = pull(torch.ones_like(loss))
    _assign(model, optimizer, slopes)
    return loss.item()


def asked_for(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> float:
    """``torch.autograd.grad``, accumulated over two halves."""
    x, y = data
    optimizer.zero_grad(set_to_none=False)
    for rows, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = loss_of(model(rows), wanted)
        for weight, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            weight.grad = slope if weight.grad is None else weight.grad + slope
    optimizer.step()
    return loss.item()


# -- no optimizer ---------------------------------------------------------------------------------------------------


def by_hand(model: nn.Module, _: Any, data: Batch) -> float:
    x, y = data
    loss = loss_of(model(x), y)
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(RATE * weight.grad)  # type: ignore[operator]  # there after backward
    model.zero_grad()
    return loss.item()


def by_data(model: nn.Module, _: Any, data: Batch) -> float:
    x, y = data
    loss = loss_of(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    for weight, slope in zip(model.parameters(), slopes, strict=True):
        weight.data.sub_(RATE * slope)
    return loss.item()


def all_at_once(model: nn.Module, _: Any, data: Batch) -> float:
    x, y = data
    loss = loss_of(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    torch._foreach_add_([weight.data for weight in model.parameters()], list(slopes), alpha=-RATE)
    return loss.item()


def transformed_by_hand(model: nn.Module, _: Any, data: Batch) -> float:
    x, y = data
    slopes = torch.func.grad(lambda w: loss_of(functional_call(model, w, (x,)), y))(_weights(model))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weight - RATE * slopes[name])
    return 0.0


WITH_BACKWARD: tuple[Way, ...] = (
    rows_by_vmap,
    nested_vmap,
    inner_step,
    tasks_by_vmap,
    slope_penalty,
)
ASSIGNED: tuple[Way, ...] = (per_sample, value_and_slope, pulled_back, asked_for)
UPDATES: tuple[Way, ...] = (by_hand, by_data, all_at_once, transformed_by_hand)
