"""Ensembles: the stacked weights of several models, which `torch.vmap` gives to one, and which the loop trains."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from ampscope import diagnose
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.primary import primary_incident
from tests.support.training.small_loop import make_scaler
from tests.support.training.twin_runs import train_both

WIDTH, BATCH, MEMBERS, STEPS, BAD, RATE = 6, 8, 3, 7, 4, 0.01
Leaves = list[Tensor]
#: Trains the stacked leaves by the losses of a step; is given the rate of the step.
Train = Callable[[Leaves, Tensor, float], None]


class Weighed(nn.Module):
    """Takes the logarithm of a column of the batch, which is 0 where it must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))) * torch.log(x[:, :1])


def by_hand(leaves: Leaves, loss: Tensor, rate: float) -> None:
    loss.backward()
    with torch.no_grad():
        for leaf in leaves:
            assert leaf.grad is not None
            leaf.sub_(rate * leaf.grad)
            leaf.grad = None


def through_data(leaves: Leaves, loss: Tensor, rate: float) -> None:
    loss.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        leaf.data -= rate * leaf.grad
        leaf.grad.zero_()


def asked_for(leaves: Leaves, loss: Tensor, rate: float) -> None:
    slopes = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        torch._foreach_add_(leaves, [slope * -rate for slope in slopes])


def of(optimizer: type[torch.optim.Optimizer], leaves: Leaves) -> Train:
    made = optimizer(leaves, lr=RATE)  # type: ignore[call-arg]  # of every optimizer of torch's

    def train(_: Leaves, loss: Tensor, rate: float) -> None:
        made.zero_grad()
        loss.backward()
        made.param_groups[0]["lr"] = rate
        made.step()

    return train


WAYS: dict[str, Callable[[Leaves], Train]] = {
    "by hand": lambda _: by_hand,
    "through data": lambda _: through_data,
    "asked for": lambda _: asked_for,
    "SGD": partial(of, torch.optim.SGD),
    "Adam": partial(of, torch.optim.Adam),
}


def ensemble(
    watch: Callable[..., Any], way: str, *, empty: int = -1, far: int = -1, on_meta: bool = False, half: bool = True
) -> Any:
    members = [Weighed() for _ in range(MEMBERS)]
    weights, buffers = stack_module_state(members)
    base = deepcopy(members[0]).to("meta") if on_meta else deepcopy(members[0])
    train = WAYS[way]([*weights.values()])
    watch(base)
    for step in range(STEPS):
        x = torch.rand(BATCH, WIDTH) + 0.5
        x[0, 0] = 0.0 if step == empty else 1.0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            out = torch.vmap(lambda w, b, rows: functional_call(base, (w, b), (rows,)), (0, 0, None))(
                weights, buffers, x
            )
        losses = (out.float() - x.sum(1, keepdim=True)).square().mean(dim=(1, 2))
        train([*weights.values()], losses.sum(), 3e38 if step == far else RATE)
    return weights


@pytest.mark.parametrize("on_meta", [False, True], ids=["", "on meta"])
@pytest.mark.parametrize("way", WAYS)
def test_one_that_trains_well_is_healthy(way: str, on_meta: bool, run_folder: Path) -> None:
    watched = train_both(partial(ensemble, way=way, on_meta=on_meta), run_folder)
    assert diagnose(watched.run).verdict is Verdict.HEALTHY
    assert [(row.step, row.micro_batches) for row in watched.steps] == [(step, 1) for step in range(STEPS)]
    assert all(row.grad_norm for row in watched.steps)
    assert (watched.findings, watched.warnings) == ([], [])


@pytest.mark.parametrize("step", [0, BAD])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_makes_is_told_in_its_step(way: str, step: int, run_folder: Path) -> None:
    watched = train_both(partial(ensemble, way=way, empty=step), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.cause, primary.op, primary.replay) == (Cause.LOG_ZERO, "aten.log.default", ReplayStatus.EXACT)
    assert primary.step == step
    assert watched.warnings == []


@pytest.mark.parametrize("way", [way for way in WAYS if way != "Adam"])
def test_weights_that_the_loop_throws_out_of_range_are_told_in_that_step(way: str, run_folder: Path) -> None:
    watched = train_both(partial(ensemble, way=way, far=BAD, half=False), run_folder)
    primary = primary_incident(watched.run)
    assert primary.step in (BAD, BAD + 1)  # they may still fit, and what is computed with them does not
    assert primary.cause is not Cause.BAD_WEIGHT


def test_a_scaler_skips_the_step_of_an_ensemble(run_folder: Path) -> None:
    def loop(watch: Callable[..., Any]) -> Any:
        members, scaler = [Weighed() for _ in range(MEMBERS)], make_scaler()
        weights, buffers = stack_module_state(members)
        base, optimizer = deepcopy(members[0]), torch.optim.SGD(weights.values(), lr=RATE)
        watch(base, scaler)
        for step in range(STEPS):
            x = torch.rand(BATCH, WIDTH) + 0.5
            x[0, 0] = float(step != BAD)
            with torch.autocast("cpu", dtype=torch.float16):
                out = torch.vmap(lambda w, b, x=x: functional_call(base, (w, b), (x,)))(weights, buffers)
            optimizer.zero_grad()
            scaler.scale(out.float().square().mean(dim=(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights, scaler

    watched = train_both(loop, run_folder)
    primary = primary_incident(watched.run)
    assert (primary.cause, primary.step, primary.replay) == (Cause.LOG_ZERO, BAD, ReplayStatus.EXACT)
    assert [row.step for row in watched.steps if row.skipped] == [BAD]
    assert (watched.findings, watched.warnings) == ([], [])


def test_weights_of_an_inner_loop_are_none_of_the_models(run_folder: Path) -> None:
    """First-order meta-learning: an optimizer holds the model's own, and another one steps copies of them."""

    def loop(watch: Callable[..., Any]) -> Any:
        model = nn.Linear(WIDTH, 1)
        outer = torch.optim.SGD(model.parameters(), lr=RATE)
        watch(model)
        for _ in range(STEPS):
            fast = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
            inner = torch.optim.SGD(fast.values(), lr=RATE)
            for _ in range(3):
                x = torch.randn(BATCH, WIDTH)
                inner.zero_grad()
                (functional_call(model, fast, (x,)) - x.sum(1, keepdim=True)).square().mean().backward()
                inner.step()
            for name, weight in model.named_parameters():
                weight.grad = weight.detach() - fast[name].detach()
            outer.step()
        return model

    watched = train_both(loop, run_folder)
    assert diagnose(watched.run).verdict is Verdict.HEALTHY
    assert [row.step for row in watched.steps] == list(range(STEPS))
    assert watched.warnings == []
