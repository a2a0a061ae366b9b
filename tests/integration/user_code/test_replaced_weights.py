"""Parameters and layers that the user replaces after the watch has begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, mlp, mse, poison
from tests.support.training.twin_runs import EXACT, train_both


def test_weights_replaced_after_the_watch_began(run_folder: Path) -> None:
    """``load_state_dict(assign=True)`` and a new layer: other tensors, known by their names as before."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        scaler = make_scaler()
        watch(model, scaler)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        model[2] = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(POISONED + 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            poison(step, scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    watched = train_both(loop, run_folder)
    assert [row.skipped for row in watched.steps] == [False] * POISONED + [True, False]
    assert watched.replay_of(POISONED) == EXACT
    assert all(name in watched.incidents[0].bad_params for name in ("0.weight", "2.weight"))
    assert watched.findings == []
