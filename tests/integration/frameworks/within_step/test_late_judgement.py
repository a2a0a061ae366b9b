"""A fused optimizer's step is judged after it: what has changed by then is said, and no fault is made of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope import diagnose
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause
from tests.support.training.twin_runs import EXACT, train_both

STEPS, WIDTH = 6, 16
Watch = Callable[..., Any]


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden * hidden)


def loads(model: nn.Module, good: dict[str, Tensor]) -> None:
    model.load_state_dict(good)


def writes_data(model: nn.Module, good: dict[str, Tensor]) -> None:
    """As averaged weights are swapped in: past the change counters."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(good[name])


def fused(watch: Watch, ends: Callable[..., None] | None = None, *, large: bool = True) -> Any:
    """The last step overflows in float16; what ``ends`` the loop comes before anything could be judged."""
    model = Squares()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    watch(model, scaler)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(8, WIDTH), torch.randint(0, 4, (8,))
        if large and step == STEPS - 1:
            with torch.no_grad():
                model.first.weight.mul_(3000.0)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if ends is not None:
        ends(model, good)
    return [model, optimizer, scaler]


def test_a_bad_loss_is_one_incident(run_folder: Path) -> None:
    watched = train_both(fused, run_folder)
    assert watched.replay_of(STEPS - 1) == EXACT  # there is one, and no second


@pytest.mark.parametrize("ends", [loads, writes_data])
def test_other_weights_are_no_fault_of_the_device(
    ends: Callable[..., None], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampscope.capture.events.OpenStep.loss_known_bad", False)  # as where it comes late
    watched = train_both(partial(fused, ends=ends), run_folder)
    status, reason = watched.replay_of(STEPS - 1)
    assert status == ReplayStatus.UNAVAILABLE
    assert "after what it computed with had changed, or may have" in reason
    assert {incident.cause for incident in diagnose(watched.run).incidents}.isdisjoint({Cause.HARDWARE_TRANSIENT})


@pytest.mark.parametrize("ends", [loads, writes_data])
def test_a_loop_in_which_nothing_goes_wrong_is_healthy(ends: Callable[..., None], run_folder: Path) -> None:
    watched = train_both(partial(fused, ends=ends, large=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"


def hooked(watch: Watch, *, bad: bool) -> Any:
    """A function on a weight's gradient, attached long before, makes an infinity."""
    model = Squares()
    factors = iter([1.0] * (STEPS - 1) + [float("inf") if bad else 1.0])
    model.last.weight.register_hook(lambda gradient: gradient * next(factors))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, WIDTH)), torch.randint(0, 4, (8,))).backward()
        optimizer.step()
    return [model, optimizer]


def test_a_function_on_a_gradient_is_not_run_again_and_that_is_said(run_folder: Path) -> None:
    watched = train_both(partial(hooked, bad=True), run_folder)
    status, reason = watched.replay_of(STEPS - 1)
    assert status == ReplayStatus.UNAVAILABLE
    assert "functions attached to parameters (last.weight)" in reason
    assert {incident.cause for incident in diagnose(watched.run).incidents}.isdisjoint({Cause.HARDWARE_TRANSIENT})


def test_a_function_on_a_gradient_does_no_harm(run_folder: Path) -> None:
    watched = train_both(partial(hooked, bad=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"
