"""The user's own contexts, modes, hooks, evaluations and exceptions around and inside a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from ampscope.trace.schema import ReplayStatus, Table
from tests.support.training.model_parts import linear
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, mlp, mse, poison, train
from tests.support.training.twin_runs import train_both

EXACT = (ReplayStatus.EXACT, "")


class Functions(TorchFunctionMode):
    """Counts the torch functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Counts the ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("cpu"),
    "flops": lambda: FlopCounterMode(display=False),
    "function mode": Functions,
    "dispatch mode": Dispatches,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(False),
    "offloading": torch.autograd.graph.save_on_cpu,
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "profiler": lambda: torch.autograd.profiler.record_function("forward"),
    "no function subclasses": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.parametrize("reach", ["forward", "forward and loss"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_around_the_forward(name: str, reach: str, run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(CONTEXTS[name]())
            out = model(x)
            if reach == "forward":
                stack.close()
            return F.mse_loss(out, y)

    watched = train_both(lambda watch: train(watch, mlp(), forward), run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert watched.warnings == []


@pytest.mark.parametrize("mode", [Functions, Dispatches], ids=lambda mode: mode.__name__)
def test_a_mode_of_the_users_sees_what_it_sees_without_the_watch(mode: type, run_folder: Path) -> None:
    """Neither AMPscope's own functions and ops nor fewer of the user's."""
    seen: list[int] = []

    def loop(watch: Callable[..., object]) -> Any:
        counter = mode()
        seen.append(0)

        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            with counter:
                loss = mse(model, x, y)
            seen[-1] = counter.seen
            return loss

        return train(watch, mlp(), forward)

    train_both(loop, run_folder)
    assert seen[0] == seen[1] > 0


@pytest.mark.parametrize("where", ["around the model", "between model and loss", "for the whole loop"])
def test_a_default_device(where: str, run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if where == "around the model":
            torch.set_default_device("cpu")
        out = model(x)
        torch.set_default_device(None if where == "around the model" else "cpu")
        loss = F.mse_loss(out, y)
        if where == "between model and loss":
            torch.set_default_device(None)
        return loss

    try:
        watched = train_both(lambda watch: train(watch, mlp(), forward), run_folder)
    finally:
        torch.set_default_device(None)
    assert watched.replay_of(POISONED) == EXACT


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        out = self.inner(x)
        if fail:
            raise ValueError("on purpose")
        return out


def test_training_goes_on_after_exceptions_in_forward(run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            model(x, fail=True)
        return F.mse_loss(model(x), y)

    watched = train_both(lambda watch: train(watch, Failing(), forward), run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert [row.loss for row in watched.steps] == pytest.approx(watched.state["losses"], rel=1e-6)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("on purpose")


def test_training_goes_on_after_exceptions_in_backward(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        taken = 0
        for number in range(2 * POISONED):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(BATCH, WIDTH))
                loss = F.mse_loss(Boom.apply(out) if number % 3 == 1 else out, torch.randn(BATCH, WIDTH))
            try:
                poison(taken, scaler.scale(loss)).backward()
            except ValueError:
                continue
            scaler.step(optimizer)
            scaler.update()
            taken += 1
        return [model, optimizer, scaler, taken]

    watched = train_both(loop, run_folder)
    assert len(watched.steps) == watched.state[-1]
    status, reason = watched.replay_of(POISONED)
    assert (status, reason) == EXACT or (status == ReplayStatus.UNAVAILABLE and "exception" in reason)


def test_training_goes_on_after_exceptions_in_the_optimizer(run_folder: Path) -> None:
    class Stumbling(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("on purpose")
            return super().step(closure)

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = Stumbling(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        for step in range(POISONED + 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            poison(step, scaler.scale(loss)).backward()
            with contextlib.suppress(ValueError):
                scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    watched = train_both(loop, run_folder)
    (incident,) = watched.incidents
    assert incident.replay == ReplayStatus.EXACT
    assert watched.warnings == []


@contextlib.contextmanager
def evaluating(model: nn.Module, mode: Callable[[], Any]) -> Iterator[None]:
    model.eval()
    with mode():
        yield
    model.train()


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "with gradients": contextlib.nullcontext}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["between steps", "after forward", "after backward"])
def test_evaluation_at_any_time(mode: str, when: str, run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        losses, scores = [], []

        def evaluate(moment: str) -> None:
            if moment == when:
                with evaluating(model, MODES[mode]):
                    scores.append(model(torch.randn(BATCH, WIDTH)).sum().item())

        for step in range(POISONED + 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            evaluate("after forward")
            poison(step, scaler.scale(loss)).backward()
            evaluate("after backward")
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            evaluate("between steps")
        return [model, optimizer, scaler, losses, scores]

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert [row.loss for row in watched.steps] == pytest.approx(watched.state[-2], rel=1e-6)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


@pytest.mark.parametrize("when", ["between steps", "after forward", "after backward"])
@pytest.mark.parametrize("seed", range(3))
def test_the_fast_path_of_an_evaluated_transformer_stays_fast(when: str, seed: int, run_folder: Path) -> None:
    """It is left when any torch function mode is active, and gives other bits then."""

    def loop(watch: Callable[..., object]) -> Any:
        torch.manual_seed(seed)
        model = _encoder()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model)
        outputs = []

        def evaluate(moment: str) -> None:
            if moment == when:
                with evaluating(model, torch.no_grad):
                    outputs.append(model(torch.randn(2, 5, 16)))

        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 5, 16)).pow(2).mean()
            evaluate("after forward")
            loss.backward()
            evaluate("after backward")
            optimizer.step()
            evaluate("between steps")
        return [model, outputs]

    train_both(loop, run_folder)


@pytest.mark.parametrize("seed", range(3))
def test_a_frozen_transformer_inside_the_model_stays_fast(seed: int, run_folder: Path) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = _encoder(), nn.Linear(16, 1)
            self.encoder.requires_grad_(False).eval()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.encoder(x)
            return self.head(features)

    def loop(watch: Callable[..., object]) -> Any:
        torch.manual_seed(seed)
        model = Probe()
        optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
        watch(model)
        losses = []
        for step in range(POISONED + 1):
            optimizer.zero_grad()
            out = model(torch.randn(2, 5, 16))
            loss = out.pow(2).mean() + (torch.sqrt(out[0, 0, 0] * 0.0) if step == POISONED else 0.0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [model, losses]

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED) == EXACT


def test_a_model_with_an_eight_bit_cast(run_folder: Path) -> None:
    """fp8 values cannot be measured; everything else can."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            return out + 0.1 * out.detach().to(torch.float8_e4m3fn).float()

    watched = train_both(lambda watch: train(watch, Quantised()), run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert watched.warnings == []
    dtypes = {dtype for row in watched.run.rows(Table.SITES) for dtype in row.out_dtypes}
    assert "float8_e4m3fn" in dtypes


@pytest.mark.parametrize("when", ["for the loop", "inside a step"])
def test_worker_processes_of_a_data_loader(when: str, run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        data = TensorDataset(torch.randn(3 * BATCH, WIDTH), torch.randn(3 * BATCH, WIDTH))
        total = torch.zeros(())
        if when == "inside a step":
            total = total + model(data.tensors[0]).mean()
        for x, y in DataLoader(data, BATCH, num_workers=1, multiprocessing_context="fork"):
            with torch.autocast("cpu", dtype=torch.float16):
                total = total + mse(model, x, y)
            if when == "for the loop":
                optimizer.zero_grad()
                scaler.scale(total).backward()
                scaler.step(optimizer)
                scaler.update()
                total = torch.zeros(())
        if when == "inside a step":
            scaler.scale(total).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model, scaler]

    watched = train_both(loop, run_folder)
    assert watched.run.status == "closed"
    assert len(watched.steps) == (3 if when == "for the loop" else 1)
    assert watched.warnings == []


class Marked(Tensor):
    """A subclass that only carries a name, as data libraries use them."""


class MarkedParameter(nn.Parameter):
    pass


@pytest.mark.parametrize("what", ["input", "target", "parameter", "buffer"])
def test_tensor_subclasses(what: str, run_folder: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            if what == "parameter":
                first = linear(self.inner, "0")
                first.weight = MarkedParameter(first.weight.detach())
            ones = torch.ones(WIDTH)
            self.register_buffer("factor", ones.as_subclass(Marked) if what == "buffer" else ones)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * self.factor).as_subclass(Tensor)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x, y = (x.as_subclass(Marked) if what == "input" else x), (y.as_subclass(Marked) if what == "target" else y)
        return F.mse_loss(model(x), y).as_subclass(Tensor)

    watched = train_both(lambda watch: train(watch, Net(), forward), run_folder)
    assert watched.replay_of(POISONED)[0] in (ReplayStatus.EXACT, ReplayStatus.UNAVAILABLE)
    assert watched.warnings == []


def test_complex_and_double_precision_parts(run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(model(x).float()).abs()
        return spectrum.double().pow(2).mean().float() + F.mse_loss(model(x).double(), y.double()).float()

    watched = train_both(lambda watch: train(watch, mlp(), forward), run_folder)
    assert watched.replay_of(POISONED) == EXACT


def test_sparse_gradients(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = nn.Sequential(nn.EmbeddingBag(20, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        watch(model)
        for step in range(POISONED + 1):
            optimizer.zero_grad()
            out = model(torch.randint(0, 20, (BATCH, 3)))
            loss = out.pow(2).mean() + (torch.sqrt(out[0, 0] * 0.0) if step == POISONED else 0.0)
            loss.backward()
            optimizer.step()
        return model

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert watched.warnings == []
