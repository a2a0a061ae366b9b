"""Loops whose optimizer leaves what is not finite, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ampscope
from ampscope.analysis.results import Incident

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
Loop = Callable[[Callable[..., object]], dict[str, Any]]


def loop(
    make: Make,
    *,
    large: float = 1.0,
    at: int = 3,
    dtype: torch.dtype = torch.float32,
    dead: bool = False,
    silent: bool = False,
) -> Loop:
    """Trains with gradients that are ``large`` once, in the first layer zero once where ``silent``, and, where
    ``dead``, always zero in one column."""

    def run(watch: Callable[..., object]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
        optimizer = make(model.parameters())
        watch(model)
        for step in range(at + 3):
            x = torch.randn(8, 4).to(dtype)
            if dead:
                x[:, 0] = 0
            optimizer.zero_grad()
            (model(x).float().mean() * (large if step == at else 1.0)).backward()
            if silent and step == at:
                model[0].zero_grad(set_to_none=False)
            optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "rng": torch.get_rng_state()}

    return run


def primary(run: Loop, folder: Path) -> Incident:
    scopes: list[ampscope.Scope] = []
    run(lambda model: scopes.append(ampscope.watch(model, dir=folder, quiet=True)))
    scopes[0].close()
    found = ampscope.diagnose(folder).primary
    assert isinstance(found, Incident)
    return found
