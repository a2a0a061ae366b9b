"""``torch.compile``: watching changes neither what is compiled nor what it computes; bad steps are replayed eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import Node, ReplayStatus, Source, Table
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, mlp, poison, train
from tests.support.training.step_traces import Trace
from tests.support.training.twin_runs import Watched, train_both, train_unwatched

EXACT = (ReplayStatus.EXACT, "")

pytestmark = [  # dynamo's own, with or without a watch
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are and counts compilations and runs."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run


def loop_over(backend: Any, how: str) -> Callable[..., Any]:
    """The recipe with a model that is compiled and watched in some order."""

    def loop(watch: Callable[..., object]) -> Any:
        torch._dynamo.reset()
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        called: Any = model
        if how == "compiled, then watched":
            called = torch.compile(model, backend=backend)
            watch(called, scaler)
        elif how == "watched, then compiled":
            watch(model, scaler)
            called = torch.compile(model, backend=backend)
        elif how == "the model inside watched":
            called = torch.compile(model, backend=backend)
            watch(model, scaler)
        elif how == "compiled in place, then watched":
            model.compile(backend=backend)
            watch(model, scaler)
        else:
            watch(model, scaler)
            model.compile(backend=backend)
        losses = []
        for step in range(POISONED + 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(called(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, WIDTH))
            poison(step, scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return [model, optimizer, scaler, losses]

    return loop


ORDERS = [
    "compiled, then watched",
    "compiled in place, then watched",
    "watched, then compiled in place",
    "watched, then compiled",
    "the model inside watched",
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ORDERS)
def test_a_compiled_model_is_replayed_eagerly(how: str, backend: str, run_folder: Path) -> None:
    watched = train_both(loop_over(backend, how), run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert [row.loss for row in watched.steps] == pytest.approx(watched.state[-1], rel=1e-6)
    trace = Trace(watched.run, POISONED, Source.REPLAY)
    assert {op.site.module for op in trace.find("addmm")} == {"0", "2"}
    assert watched.warnings == []


@pytest.mark.parametrize("how", ORDERS)
def test_watching_adds_neither_compilations_nor_graphs(how: str, run_folder: Path) -> None:
    counts = []

    def run(watch: Callable[..., object] | None) -> None:
        backend = Counting()
        loop = loop_over(backend, how)
        if watch is None:
            train_unwatched(loop)
        else:
            Watched.train(loop, run_folder)
        counts.append((backend.compiled, backend.ran))

    run(None)
    run(lambda: None)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("where", ["in the model", "in the loss"])
def test_a_compiled_function_stays_compiled(where: str, run_folder: Path) -> None:
    """A function that was compiled by itself runs compiled in every step, the first ones included."""

    def loop(watch: Callable[..., object]) -> Any:
        torch._dynamo.reset()
        backend = Counting()
        activate = torch.compile(lambda t: torch.relu(t) * 2, backend=backend)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                hidden = self.first(x)
                return self.second(activate(hidden) if where == "in the model" else torch.relu(hidden))

        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            out = model(x)
            return F.mse_loss(activate(out) if where == "in the loss" else out, y)

        state = train(watch, Net(), forward)
        return state | {"compiled": backend.compiled, "ran": backend.ran}

    watched = train_both(loop, run_folder)
    assert watched.state["ran"] == len(watched.steps)
    assert watched.replay_of(POISONED) == EXACT


def test_a_compiled_model_is_traced_once_in_the_interval(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampscope.capture.budgets.INTERVAL", 10)

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        model.compile(backend="eager")
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        for _ in range(16):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(torch.randn(BATCH, WIDTH)).float(), torch.zeros(BATCH, WIDTH))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model]

    traced = [row.step for row in Watched.train(loop, run_folder).steps if row.traced]
    assert traced[:2] == [0, 10]
    assert len(traced) <= 4


def test_the_recorded_weights_are_those_that_the_step_ran_with(run_folder: Path) -> None:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(WIDTH, 1))
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    largest = []
    with ampscope.watch(model, dir=run_folder, quiet=True, every=1):
        for _ in range(4):
            largest.append(first.weight.abs().max().item())
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(4, WIDTH)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(set(largest)) == len(largest)
    with ampscope.open_run(run_folder) as run:
        (weight,) = (site.site for site in run.rows(Table.SITES, op=Node.PARAMETER) if site.name == "0.weight")
        seen = {row.step: max(abs(row.min or 0), abs(row.max or 0)) for row in run.rows(Table.OPS, site=weight)}
    assert len(seen) > 1
    assert seen == {step: pytest.approx(largest[step]) for step in seen}
