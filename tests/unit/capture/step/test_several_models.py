"""Several models, optimizers and losses in one loop; parts of a model called by themselves; wrapped models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import ReplayStatus, Source, Table
from tests.support.training.model_parts import grad_norm
from tests.support.training.small_loop import (
    BATCH,
    POISONED,
    WIDTH,
    here,
    make_batch,
    make_scaler,
    mlp,
    mse,
    poison,
    train,
)
from tests.support.training.step_traces import Trace
from tests.support.training.twin_runs import EXACT, Watched, train_both


def gan(*, bad: str, watched: str = "both") -> Callable[..., Any]:
    """Critic and generator take turns, share one fake batch and one scaler; ``bad`` names whose step overflows."""

    def loop(watch: Callable[..., object]) -> Any:
        generator, critic = mlp(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        models = {"both": [generator, critic], "generator": generator, "critic": critic}
        of_generator = torch.optim.Adam(generator.parameters(), 1e-3)
        of_critic = torch.optim.Adam(critic.parameters(), 1e-3)
        scaler = make_scaler()
        watch(models[watched], scaler)
        rows = []
        for step in range(POISONED + 2):
            with torch.autocast(here(), dtype=torch.float16):
                fake = generator(torch.randn(BATCH, WIDTH))
                real = torch.randn(BATCH, WIDTH)
                loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            of_critic.zero_grad()
            scaled = scaler.scale(loss)
            (poison(step, scaled) if bad in ("critic", "both") else scaled).backward()
            scaler.step(of_critic)
            rows.append(loss.item())
            with torch.autocast(here(), dtype=torch.float16):
                loss = F.softplus(-critic(fake)).mean()
            of_generator.zero_grad()
            scaled = scaler.scale(loss)
            (poison(step, scaled) if bad in ("generator", "both") else scaled).backward()
            scaler.step(of_generator)
            scaler.update()
            rows.append(loss.item())
        return [generator, critic, of_generator, of_critic, scaler, rows]

    return loop


class TestGan:
    def test_each_turn_has_its_own_row(self, run_folder: Path) -> None:
        watched = train_both(gan(bad="nobody"), run_folder)
        losses = watched.state[-1]
        for optimizer in (0, 1):
            rows = [row for row in watched.steps if row.optimizer == optimizer]
            assert [row.step for row in rows] == list(range(POISONED + 2))
            assert [row.loss for row in rows] == pytest.approx(losses[optimizer::2], rel=1e-3)
            assert {row.micro_batches for row in rows} == {1}
        assert watched.incidents == []

    @pytest.mark.parametrize(("bad", "optimizers"), [("critic", [0]), ("generator", [1]), ("both", [0, 1])])
    def test_the_turn_that_went_bad_is_replayed(self, bad: str, optimizers: list[int], run_folder: Path) -> None:
        watched = train_both(gan(bad=bad), run_folder)
        assert [(row.step, row.optimizer) for row in watched.incidents] == [(POISONED, one) for one in optimizers]
        for optimizer in optimizers:
            status, reason = watched.replay_of(POISONED, optimizer)
            if bad == "generator":  # the critic has stepped since it took part in the generator's step
                assert (status, reason) in (EXACT, (ReplayStatus.DIVERGED, "weights changed since"))
            else:
                assert (status, reason) == EXACT

    @pytest.mark.parametrize("watched_part", ["generator", "critic"])
    def test_the_optimizer_of_an_unwatched_model_is_left_alone(self, watched_part: str, run_folder: Path) -> None:
        watched = train_both(gan(bad="nobody", watched=watched_part), run_folder)
        assert len({row.optimizer for row in watched.steps}) == 1
        assert len(watched.steps) == POISONED + 2
        assert not any(row.skipped for row in watched.steps)
        assert watched.incidents == []
        assert ampscope.diagnose(watched.run).verdict == "healthy"


def two_by_two(watch: Callable[..., object], *, unscale: bool) -> Any:
    """Two models, two losses that both reach both models, two optimizers, one backward after the other."""
    models = [mlp(), mlp()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    scaler = make_scaler()
    watch(models, scaler)
    rows = []
    for step in range(POISONED + 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = make_batch()
        with torch.autocast(here(), dtype=torch.float16):
            one, other = models[0](x), models[1](y)
            losses = [F.mse_loss(one, other), F.l1_loss(one, y) + other.float().mean()]
        scaler.scale(losses[0]).backward(retain_graph=True)
        poison(step, scaler.scale(losses[1])).backward()
        if unscale:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        scale = 1.0 if unscale else scaler.get_scale()
        rows.append([grad_norm(model.parameters()) / scale for model in models])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return [*models, *optimizers, scaler, rows]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled by the loop"])
def test_two_optimizers_after_one_forward(unscale: bool, run_folder: Path) -> None:
    watched = train_both(lambda watch: two_by_two(watch, unscale=unscale), run_folder)
    for row in watched.steps:
        expected = watched.state[-1][row.step][row.optimizer]
        assert row.skipped is (row.step == POISONED)
        if not row.skipped:
            assert row.grad_norm == pytest.approx(expected, rel=1e-5)
    assert watched.replay_of(POISONED, 0) == EXACT
    assert watched.replay_of(POISONED, 1) == EXACT


class Parts(nn.Module):
    """Never called itself: the loop calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.late = mlp(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


@pytest.mark.usefixtures("device")
def test_parts_of_a_model_called_by_the_loop_have_their_names(run_folder: Path) -> None:
    def forward(model: Parts, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model.head(F.gelu(model.encoder(x))), y)

    watched = train_both(lambda watch: train(watch, Parts(), forward), run_folder)
    assert watched.replay_of(POISONED) == EXACT
    trace = Trace(watched.run, POISONED, Source.REPLAY)
    assert {op.site.module for op in trace.find("addmm")} == {"encoder.0", "encoder.2", "head"}
    assert [op.site.phase for op in trace.find("aten.gelu.")] == ["loss"]


@pytest.mark.usefixtures("device")
def test_a_part_first_called_late_still_replays_exactly(run_folder: Path) -> None:
    calls = iter(range(100))

    def forward(model: Parts, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.encoder(x)
        return F.mse_loss(model.late(hidden) if next(calls) % 100 >= POISONED - 1 else model.head(hidden), y)

    def loop(watch: Callable[..., object]) -> Any:
        nonlocal calls
        calls = iter(range(100))
        return train(watch, Parts(), forward)

    assert train_both(loop, run_folder).replay_of(POISONED) == EXACT


@pytest.mark.usefixtures("device")
def test_named_models_in_a_dict(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        models = {"encoder": mlp(), "head": nn.Linear(WIDTH, WIDTH)}
        parameters = [p for model in models.values() for p in model.parameters()]
        both = nn.ModuleDict(models)
        return train(
            lambda _, scaler: watch(models, scaler),
            both,
            lambda _, x, y: F.mse_loss(models["head"](models["encoder"](x)), y),
            parameters=parameters,
        )

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED) == EXACT
    names = [row.name for row in watched.run.rows(Table.PARAMS)]
    assert len(set(names)) == 6


class TestDistributed:
    """``DistributedDataParallel`` in a group of one: named as the model inside, replayed without communication."""

    @pytest.fixture(autouse=True)
    def group(self, tmp_path: Path) -> Iterator[None]:
        if not dist.is_available():
            pytest.skip("torch was built without distributed")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def test_accumulation_with_no_sync(self, run_folder: Path) -> None:
        def loop(watch: Callable[..., object]) -> Any:
            inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
            model = nn.parallel.DistributedDataParallel(inner)
            optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
            watch(model, scaler)
            losses = []
            for step in range(POISONED + 2):
                for part in range(2):
                    with model.no_sync() if part == 0 else contextlib.nullcontext():
                        with torch.autocast(here(), dtype=torch.float16):
                            loss = mse(model, *make_batch())
                        poison(step, scaler.scale(loss)).backward()
                    losses.append(loss.item())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return [inner, optimizer, scaler, losses]

        watched = train_both(loop, run_folder)
        assert watched.replay_of(POISONED) == EXACT
        assert {row.micro_batches for row in watched.steps} == {2}
        assert {row.name for row in watched.run.rows(Table.PARAMS, kind="parameter")} == {
            *("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
        }
        assert ampscope.diagnose(watched.run).run.model == "Sequential"


@pytest.mark.usefixtures("device")
def test_steps_of_an_optimizer_made_anew(run_folder: Path) -> None:
    """A loop that makes a new optimizer (unfreezing, a new learning rate) goes on counting its own steps."""

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        scaler = make_scaler()
        watch(model, scaler)
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for _ in range(2):
                optimizer.zero_grad()
                with torch.autocast(here(), dtype=torch.float16):
                    loss = mse(model, *make_batch())
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return [model, scaler]

    watched: Watched = train_both(loop, run_folder)
    assert len(watched.steps) == 4
    assert len({(row.optimizer, row.step) for row in watched.steps}) == 4
