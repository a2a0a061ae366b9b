"""Calls of a watched model inside the transforms of torch.func, and with other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampscope.trace.schema import Table
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, mlp, mse, train
from tests.support.training.twin_runs import train_both

pytestmark = pytest.mark.usefixtures("device")


def _per_sample(watch: Callable[..., object], *, looks: bool) -> Any:
    """The model is called inside ``vmap`` and ``grad`` of torch.func, and then as usual, in turns."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch(model)

    def single(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, weights, (x[None],)), y[None])

    for _ in range(3):
        x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        if looks:
            mse(model, x, y).item()  # a forward that opens a step
        weights = {name: p.detach() for name, p in model.named_parameters()}
        slopes = torch.func.vmap(torch.func.grad(single), in_dims=(None, 0, 0))(weights, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = slopes[name].mean(0)
        optimizer.step()
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    return [model, optimizer]


def test_transforms_of_torch_func_break_nothing(run_folder: Path) -> None:
    watched = train_both(lambda watch: _per_sample(watch, looks=True), run_folder)
    assert watched.warnings == []
    assert len(watched.steps) >= 3


def test_steps_with_gradients_from_torch_func_have_rows(run_folder: Path) -> None:
    assert len(train_both(lambda watch: _per_sample(watch, looks=False), run_folder).steps) == 6


@pytest.mark.parametrize("inner", [False, True], ids=["scaled weights", "an inner step"])
def test_a_call_with_other_weights(inner: bool, run_folder: Path) -> None:
    """``functional_call``, as meta-learning uses it."""

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: p * 1.5 for name, p in model.named_parameters()}
        if inner:
            slopes = torch.autograd.grad(mse(model, x, y), list(model.parameters()), create_graph=True)
            weights = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    watched = train_both(lambda watch: train(watch, mlp(), forward), run_folder)
    assert watched.warnings == []
    assert watched.replay_of(POISONED)[0] in ("exact", "diverged", "unavailable")
    assert {row.name for row in watched.run.rows(Table.PARAMS)} == {"0.weight", "0.bias", "2.weight", "2.bias"}
