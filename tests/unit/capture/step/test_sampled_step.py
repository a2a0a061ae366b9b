"""What the trace of a healthy step holds: every statistic of ops, gradients and state, when its turn has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampscope
from ampscope.capture.budgets import FULL_EVERY
from ampscope.capture.torch_support import guard
from ampscope.trace.schema import Node, OpRow, Phase, SiteRow, Table, Trigger
from tests.support.training.twin_runs import exact_state, seed_everything

SCALE = 64.0
STEPS = 9

Traced = list[tuple[OpRow, SiteRow]]


def train(
    watch: Callable[..., Any] | None, steps: int = STEPS, *, unscale: bool = True, fused: bool = False
) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """Trains a small net; returns its state and each step's unscaled gradients."""
    seed_everything()
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10_000)
    gradients = []
    if watch is not None:
        watch(model, scaler)
    for _ in range(steps):
        x, y = torch.randn(8, 6), torch.randint(0, 2, (8,))
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        scaler.step(optimizer)
        scaler.update()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, gradients


def traced(run: ampscope.Run, step: int) -> Traced:
    sites = {site.site: site for site in run.rows(Table.SITES)}
    return [(row, sites[row.site]) for row in run.rows(Table.OPS, step=step)]


def of_node(rows: Traced, node: Node) -> dict[str, OpRow]:
    return {site.name: row for row, site in rows if site.op == node}


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of AMPscope's own ends the test."""
    monkeypatch.setattr(guard, "RAISE", True)


@pytest.fixture
def run(watch: Callable[..., ampscope.Scope]) -> Callable[..., tuple[ampscope.Run, list[dict[str, torch.Tensor]]]]:
    def look(steps: int = STEPS, **options: Any) -> tuple[ampscope.Run, list[dict[str, torch.Tensor]]]:
        scopes: list[ampscope.Scope] = []
        loop = {name: options.pop(name) for name in ("unscale", "fused") if name in options}
        _, gradients = train(lambda *args: scopes.append(watch(*args, **options)), steps, **loop)
        scopes[0].close()
        return ampscope.open_run(scopes[0].folder), gradients

    return look


Run = Callable[..., tuple[ampscope.Run, list[dict[str, torch.Tensor]]]]


def test_every_floating_tensor_of_a_small_step_has_every_statistic(run: Run) -> None:
    rows = traced(run()[0], 8)
    floating = [row for row, site in rows if site.out_dtypes[row.out : row.out + 1] != ("int64",)]
    assert len(floating) > 20
    assert {site.phase for _, site in rows} >= {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
    for row in floating:
        seen = row.statistics
        assert seen.max_finite == max(abs(seen.min or 0.0), abs(seen.max or 0.0))
        assert (seen.nan, seen.posinf, seen.neginf) == (0, 0, 0)
        assert (seen.zeros or 0) + sum(seen.exp_counts or ()) == row.numel


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_carry_the_scale_and_state_is_that_after_the_step(run: Run, unscale: bool, fused: bool) -> None:
    recorded, gradients = run(unscale=unscale, fused=fused)
    rows = traced(recorded, 8)
    found = of_node(rows, Node.GRADIENT)
    assert found.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, row in found.items():
        scaled = gradients[8][name] * (SCALE if unscale else 1.0)
        assert row.statistics.max_finite == pytest.approx(scaled.abs().max().item(), rel=1e-6)
    written = {edge.seq for edge in recorded.rows(Table.EDGES, step=8)}
    assert written.issuperset(row.seq for row in found.values()), "the ops that gave them are known"
    state = of_node(rows, Node.STATE_AFTER)
    assert state.keys() == {f"{key} of {name}" for key in ("exp_avg", "exp_avg_sq") for name in found}


def test_state_is_what_the_optimizer_left(run: Run) -> None:
    rows, (left, _) = traced(run()[0], 8), train(None)
    moments = left["optimizer"]["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        row = of_node(rows, Node.STATE_AFTER)[f"{key} of 0.weight"]
        assert row.statistics.max_finite == pytest.approx(moments[key].abs().max().item(), rel=1e-6)
        assert row.numel == moments[key].numel()


class Flushing(nn.Module):
    """Multiplies in half precision by what leaves little of it, or much."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 63).half())
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.half() * self.factor).float()


@pytest.mark.parametrize("factor", [3e-7, 0.5])
def test_zeros_that_float32_would_not_have_had_are_counted(watch: Callable[..., ampscope.Scope], factor: float) -> None:
    model, x = Flushing(factor), torch.linspace(1e-9, 1.0, 63)
    cast, start = x.half(), model.weight.detach().clone()
    scope = watch(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (model(x) * 2.0).sum().backward()
    gradient = model.weight.grad
    optimizer.step()
    scope.close()
    found: dict[str, list[int | None]] = {}
    for row, site in traced(ampscope.open_run(scope.folder), 0):
        found.setdefault(f"{site.op} {site.phase}".strip(), []).append(row.statistics.flushed)
    product = start * cast
    flushed = ((product * factor == 0) & (product.float() * factor != 0)).sum().item()
    assert found["aten.mul.Tensor forward"] == [0, flushed]
    assert (flushed > 0) is (factor < 1e-3)
    assert found["aten._to_copy.default forward"] == [1, None]  # and back to float32
    assert gradient is not None
    back = torch.full((63,), 2.0 * factor).half()
    assert found[Node.GRADIENT] == [((gradient == 0) & (back.float() * cast.float() != 0)).sum().item()]
    assert found[f"{Node.PARAMETER} {Phase.FORWARD}"] == [None]


def test_of_steps_asked_for_some_have_them(run: Run) -> None:
    recorded, _ = run(every=2, steps=FULL_EVERY + 1)
    whole = {step for step in range(0, FULL_EVERY + 1, 2) if of_node(traced(recorded, step), Node.GRADIENT)}
    assert whole == {0, FULL_EVERY}
    plain = [row.statistics for row, _ in traced(recorded, 2)]
    assert plain
    assert all(seen.zeros is None and seen.exp_counts is None for seen in plain)


@pytest.mark.parametrize("options", [{}, {"every": 1}, {"every": 3}], ids=str)
def test_training_stays_as_it_is(watch: Callable[..., Any], options: dict[str, Any]) -> None:
    unwatched = exact_state(train(None, 20))
    assert exact_state(train(lambda *args: watch(*args, **options), 20)) == unwatched


def test_which_steps_are_traced_is_known(run: Run) -> None:
    rows = run(steps=40)[0].rows(Table.STEPS)
    assert [row.step for row in rows if row.traced] == [0, 8, 16, 32]


def test_state_that_is_not_finite_is_no_row_of_a_healthy_step(watch: Callable[..., ampscope.Scope]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: optimizer.state[model.weight]["momentum_buffer"].fill_(torch.inf))
    scope = watch(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scope.close()
    run = ampscope.open_run(scope.folder)
    assert of_node(traced(run, 0), Node.STATE_AFTER).keys() == {"momentum_buffer of bias"}
    assert [row.trigger for row in run.rows(Table.INCIDENTS)] == [Trigger.NONFINITE_STATE]
