"""AMPscope's own arithmetic runs outside the loop's autocast, and leaves what autocast has cast for the loop."""

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
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.torch_support.modes import Pause
from ampscope.trace.schema import ReplayStatus
from tests.support.primary import primary_incident
from tests.support.training.small_loop import BATCH, POISONED, STEPS, WIDTH, make_scaler
from tests.support.training.twin_runs import train_both


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def fused(watch: Callable[..., Any], *, bad: bool) -> Any:
    """A fused optimizer's decision is read in the next forward, inside the loop's autocast; so is all that follows."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Squared(), nn.Linear(WIDTH, 4))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3, fused=True), make_scaler()
    watch(model, scaler)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH) * (3000 if bad and step == POISONED else 1)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), torch.randint(0, 4, (BATCH,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [model, optimizer, scaler]


def test_a_decision_that_is_read_under_autocast(run_folder: Path) -> None:
    watched = train_both(partial(fused, bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.step, primary.op, primary.module) == (POISONED, "aten.mul.Tensor", "1")
    assert primary.replay == ReplayStatus.EXACT
    assert any(remedy.verified for remedy in primary.remedies)
    assert watched.warnings == []


def test_the_same_loop_in_health(run_folder: Path) -> None:
    watched = train_both(partial(fused, bad=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"
    assert watched.warnings == []


def test_weights_that_autocast_has_cast_stay_cast(run_folder: Path) -> None:
    """Two forwards of one region share the cast weight, whatever AMPscope computes in between."""

    def loop(watch: Callable[..., Any]) -> Any:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        watch(model, every=1)
        shared = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                losses = [model(torch.randn(BATCH, WIDTH)).sum() for _ in range(2)]
                shared.append(_cast_of_bias(losses[0]) is _cast_of_bias(losses[1]))
            sum(losses, torch.zeros(())).backward()
            optimizer.step()
        return [model, shared]

    assert train_both(loop, run_folder).state[1] == [True] * STEPS


def _cast_of_bias(loss: Tensor) -> Any:
    """The node that cast the bias of a linear layer, behind the sum of its result."""
    assert loss.grad_fn is not None
    product = loss.grad_fn.next_functions[0][0]
    assert product is not None
    cast = product.next_functions[0][0]
    assert cast is not None
    assert cast.name() == "ToCopyBackward0"
    return cast


@pytest.mark.parametrize("inference", [False, True])
def test_switches_are_put_back_as_they_were(*, inference: bool) -> None:
    own = OwnWork(Pause(), print)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.inference_mode(inference):
        grad = torch.is_grad_enabled()
        with own:
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
            region = own.ambient.regions[0]
            assert (region.enabled, region.dtype, own.ambient.grad) == (True, torch.bfloat16, grad)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled() is inference
        assert torch.is_grad_enabled() is grad
        assert not torch.is_autocast_cache_enabled()
    with own:
        assert not own.ambient.regions[0].enabled
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("grad", [False, True])
def test_grad_mode_is_put_back_after_work_that_was_broken_off(*, grad: bool) -> None:
    own = OwnWork(Pause(), print)
    with torch.set_grad_enabled(grad):
        with own:
            torch.set_grad_enabled(not grad)
        assert torch.is_grad_enabled() is grad
        own.__enter__()
        torch.set_grad_enabled(not grad)
        own.start_afresh()
        assert torch.is_grad_enabled() is grad
    with torch.set_grad_enabled(not grad):
        own.start_afresh()  # of work that was broken off before it was entered
        assert torch.is_grad_enabled() is not grad
