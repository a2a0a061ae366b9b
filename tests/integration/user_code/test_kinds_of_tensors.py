"""Models with tensors of other kinds: eight bits, subclasses, complex and double precision, sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.trace.schema import ReplayStatus, Table
from tests.support.training.model_parts import linear
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, mlp, train
from tests.support.training.twin_runs import EXACT, train_both


@pytest.mark.usefixtures("device")
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


class Marked(Tensor):
    """A subclass that only carries a name, as data libraries use them."""


class MarkedParameter(nn.Parameter):
    pass


@pytest.mark.usefixtures("device")
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


@pytest.mark.usefixtures("device")
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
