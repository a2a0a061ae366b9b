"""Backward under watch uses the same formulas, and calls the hooks of the loss once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.training.model_parts import linear
from tests.support.training.small_loop import POISONED, mlp, train
from tests.support.training.twin_runs import EXACT, train_both

pytestmark = pytest.mark.usefixtures("device")


def test_formulas_of_backward_do_not_change(run_folder: Path) -> None:
    """Some ops have another backward formula under a dispatch mode, with other rounding."""

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x).float().masked_fill(x > 1.0, linear(model, "0").bias.mean())
        return (1 + 0.01 * out).prod(1).sum() + F.mse_loss(out, y)

    train_both(lambda watch: train(watch, mlp(), forward), run_folder)


def test_a_hook_in_the_loss_that_takes_notes(run_folder: Path) -> None:
    notes: list[float] = []

    def loop(watch: Callable[..., object]) -> Any:
        notes.clear()

        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            out = model(x).float()
            out.register_hook(lambda gradient: notes.append(gradient.sum().item()))
            return F.mse_loss(out, y)

        return train(watch, mlp(), forward) | {"notes": list(notes)}

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert len(watched.state["notes"]) == len(watched.steps)
