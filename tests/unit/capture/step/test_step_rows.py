"""The table of steps against numbers that the loop computes by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.trace.schema import ReplayStatus, Table, Trigger
from tests.support.training.model_parts import grad_norm, grad_of
from tests.support.training.small_loop import (
    BATCH,
    GAIN,
    POISONED,
    WIDTH,
    make_batch,
    make_scaler,
    mlp,
    mse,
    poison,
    train,
)
from tests.support.training.twin_runs import Watched, exact_state, train_both


def test_loss_gradient_norm_learning_rate_and_micro_batches(run_folder: Path) -> None:
    """The loss is the mean of those that backward was called on; the norm is unscaled and taken before clipping."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.5), make_scaler()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        watch(model, scaler)
        rows = []
        for step in range(5):
            optimizer.zero_grad()
            losses = []
            for _ in range(step % 3 + 1):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = mse(model, *make_batch())
                scaler.scale(loss).backward()
                losses.append(loss.item())
            scaler.unscale_(optimizer)
            norm = grad_norm(model.parameters())
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            rows.append((sum(losses) / len(losses), norm, optimizer.param_groups[0]["lr"], len(losses)))
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        return rows

    watched = Watched.train(loop, run_folder)
    assert [row.step for row in watched.steps] == list(range(5))
    for row, (loss, norm, lr, micro_batches) in zip(watched.steps, watched.state, strict=True):
        assert row.loss == pytest.approx(loss, rel=1e-6)
        assert row.grad_norm == pytest.approx(norm, rel=1e-5)
        assert row.lr == pytest.approx(lr)
        assert row.micro_batches == micro_batches
        assert (row.optimizer, row.segment, row.skipped) == (0, 0, False)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_learning_rates_of_groups_are_told_where_they_differ(as_tensor: bool, run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        first, *others = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": others, "name": "he\u00e4d"}]
        optimizer = torch.optim.SGD(groups, torch.tensor(0.5) if as_tensor else 0.5)
        watch(model)
        for step in range(4):
            optimizer.zero_grad()
            mse(model, *make_batch()).backward()
            if step == 2:
                optimizer.param_groups[1]["lr"] = torch.tensor(0.125) if as_tensor else 1 / 8
            optimizer.step()
        return exact_state(model.state_dict())

    watched = train_both(loop, run_folder)
    told = [row.lrs and json.loads(row.lrs) for row in watched.steps]
    assert told == [None, None, *[{"0": 0.5, "1 he\u00e4d": 0.125}] * 2]
    assert {row.lr for row in watched.steps} == {0.5}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled by the loop"])
@pytest.mark.parametrize("cleared", ["before forward", "after forward"])
def test_an_optimizer_that_decides_on_the_device(
    make: Callable[..., Any], unscale: bool, cleared: str, run_folder: Path
) -> None:
    """``fused=True``: the skip is learnt a step later, the record is the same."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = make(model.parameters(), 0.01, fused=True), make_scaler()
        watch(model, scaler)
        rows = []
        for step in range(POISONED + 2):
            if cleared == "before forward":
                optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, *make_batch())
            if cleared == "after forward":
                optimizer.zero_grad()
            poison(step, scaler.scale(loss)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scale = scaler.get_scale()
            norm = grad_norm(model.parameters()) / (1.0 if unscale else scale)
            scaler.step(optimizer)
            scaler.update()
            rows.append((loss.item(), scale, norm))
        return [model, optimizer, scaler, rows]

    watched = train_both(loop, run_folder)
    assert [row.skipped for row in watched.steps] == [False] * POISONED + [True, False]
    for row, (loss, scale, norm) in zip(watched.steps, watched.state[-1], strict=True):
        assert row.loss == pytest.approx(loss, rel=1e-6)
        assert row.scale == scale
        if row.step != POISONED:
            assert row.grad_norm == pytest.approx(norm, rel=1e-4)
    (incident,) = watched.incidents
    assert (incident.step, incident.scale) == (POISONED, watched.state[-1][POISONED][1])
    assert (incident.replay, incident.replay_reason) == (ReplayStatus.EXACT, "")
    assert all(name in incident.bad_params for name in ("0.weight", "0.bias", "2.weight", "2.bias"))


def test_the_gradients_of_a_bad_step_are_kept_one_by_one(run_folder: Path) -> None:
    """One parameter overflows, another stays finite, a third gets nothing but zeros."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.calm, self.dead = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, gain: float) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                dead = self.dead(x) * 0.0
                return self.loud(x).sum() * gain + self.calm(x).sum() + dead.sum()

    def loop(watch: Callable[..., object]) -> Any:
        model = Three()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), make_scaler(init_scale=2.0**10)
        watch(model, scaler)
        gradients = {}
        for gain in (1.0, 1e38):
            optimizer.zero_grad()
            loss = model(torch.full((2, WIDTH), 3.0), gain)
            scaler.scale(loss).backward()
            gradients = {name: grad_of(p).clone() for name, p in model.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
        return gradients

    watched = Watched.train(loop, run_folder)
    names = {row.param: row.name for row in watched.run.rows(Table.PARAMS)}
    rows = {names[row.param]: row for row in watched.run.rows(Table.GRADS, step=1)}
    assert set(rows) == set(watched.state)
    assert rows["loud.weight"].nonfinite
    assert rows["loud.weight"].max_abs is None
    assert not rows["calm.weight"].nonfinite
    assert rows["calm.weight"].max_abs == pytest.approx(6.0)
    assert rows["calm.weight"].underflow == 0.0
    assert rows["dead.weight"].max_abs == 0.0
    assert rows["dead.weight"].underflow == 1.0
    (incident,) = watched.incidents
    assert "loud.weight" in incident.bad_params
    assert "calm" not in incident.bad_params


def test_without_a_scaler_a_bad_step_is_seen_before_it_poisons_the_weights(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        watch(model)
        for step in range(POISONED + 1):
            optimizer.zero_grad()
            out = model(torch.randn(BATCH, WIDTH))
            loss = out.pow(2).mean() + (torch.sqrt(out[0, 0] * 0.0) if step == POISONED else 0.0)
            loss.backward()
            optimizer.step()
        return [model, optimizer]

    watched = train_both(loop, run_folder)
    (incident,) = watched.incidents
    assert (incident.step, incident.trigger) == (POISONED, Trigger.NONFINITE_GRADIENT)
    assert (incident.replay, incident.replay_reason) == (ReplayStatus.EXACT, "")
    assert (incident.scale, watched.steps[POISONED].found_inf) == (None, None)


def test_a_loss_that_is_not_finite_is_an_incident_even_if_gradients_are(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        watch(model)
        for step in range(POISONED + 2):
            optimizer.zero_grad()
            loss = mse(model, *make_batch())
            if step == POISONED:
                loss = loss + torch.log(torch.zeros(()))  # a constant: no gradient passes
            loss.backward()
            optimizer.step()
        return [model, optimizer]

    watched = train_both(loop, run_folder)
    (incident,) = watched.incidents
    assert (incident.step, incident.trigger) == (POISONED, Trigger.NONFINITE_LOSS)
    assert incident.replay == ReplayStatus.EXACT


def test_a_closure_makes_the_step_inside_the_optimizer(run_folder: Path) -> None:
    """``optimizer.step(closure)``, as some trainers always call it: forward and backward happen inside."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model)
        rows = []
        for _ in range(4):
            x, y = make_batch()

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                loss.backward()
                rows.append((loss.item(), grad_norm(model.parameters())))
                return loss

            optimizer.step(closure)
        return [model, optimizer, rows]

    watched = train_both(loop, run_folder)
    assert [row.step for row in watched.steps] == [0, 1, 2, 3]
    for row, (loss, norm) in zip(watched.steps, watched.state[-1], strict=True):
        assert row.loss == pytest.approx(loss)
        assert row.grad_norm == pytest.approx(norm, rel=1e-5)
        assert row.micro_batches == 1


def test_lbfgs_calls_its_closure_as_often_as_it_likes(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
        watch(model)
        losses = []
        for _ in range(3):
            x, y = make_batch()

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return [model, losses]

    watched = train_both(loop, run_folder)
    assert [row.step for row in watched.steps] == [0, 1, 2]
    assert watched.warnings == []


def test_steps_of_a_reentrant_checkpoint_around_the_model_have_the_loops_loss(run_folder: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)

    watched = train_both(lambda watch: train(watch, mlp(), forward), run_folder)
    assert [row.loss for row in watched.steps] == pytest.approx(watched.state["losses"], rel=1e-6)
    assert {row.micro_batches for row in watched.steps} == {1}


def test_a_loss_of_a_few_elements_counts_with_its_mean(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model)
        out = model(torch.randn(BATCH, WIDTH)).pow(2).mean(1)
        out.backward(gradient=torch.ones(BATCH))
        optimizer.step()
        return out.mean().item()

    watched = Watched.train(loop, run_folder)
    assert watched.steps[0].loss == pytest.approx(watched.state)


def test_a_second_watch_in_the_same_folder_counts_on(run_folder: Path) -> None:
    """The same process watches, closes and watches again: a second segment of one run."""

    def loop(watch: Callable[..., Any]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), make_scaler(growth_interval=100)
        for _ in range(2):
            scope = watch(model, scaler)
            for step in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = mse(model, *make_batch())
                (scaler.scale(loss) * (GAIN if step else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            if scope is not None:
                scope.close()
        return [model, optimizer, scaler]

    watched = train_both(loop, run_folder)
    assert [(row.step, row.segment, row.scale) for row in watched.steps] == [
        (0, 0, 256.0),
        (1, 0, 256.0),
        (2, 1, 128.0),
        (3, 1, 128.0),
    ]
    assert [(row.step, row.replay) for row in watched.incidents] == [(1, "exact"), (3, "exact")]
