"""A replay computes with the kernels that contexts had chosen, on operands that lie in memory as the real ones did."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.isolation.write_guard import WriteGuard
from ampscope.capture.rerun import substitutes
from ampscope.capture.rerun.substitutes import Substitutes
from ampscope.capture.torch_support import call_state
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import ReplayStatus, Table
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, mlp, mse, train
from tests.support.training.small_models import TwoLayers
from tests.support.training.twin_runs import train_both

pytestmark = pytest.mark.usefixtures("device")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).view(1, 1, BATCH, 3, WIDTH).unbind(3)
        return F.scaled_dot_product_attention(q, k, v).view(BATCH, WIDTH)


def _around_the_call(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return mse(model, x, y)


def _around_one_function(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x).view(1, 1, BATCH, WIDTH)
    with sdpa_kernel(SDPBackend.MATH):
        mixed = F.scaled_dot_product_attention(out, out, out)
    return F.mse_loss(mixed.view(BATCH, WIDTH), y)


@pytest.mark.parametrize(
    ("model", "forward"), [(Attention, _around_the_call), (mlp, _around_one_function)], ids=["a module", "a function"]
)
def test_attention_runs_the_kernel_that_a_context_chose(
    model: Callable[[], nn.Module], forward: Any, run_folder: Path
) -> None:
    watched = train_both(lambda watch: train(watch, model(), forward), run_folder, every=0, replay_budget=0)
    assert watched.replay_of(POISONED) == (ReplayStatus.EXACT, "")
    ops = {row.op for row in watched.run.rows(Table.SITES)}
    assert "aten.bmm.default" in ops
    assert not any("flash" in op for op in ops)


def test_a_backward_runs_under_the_settings_around_it(run_folder: Path) -> None:
    seen: SimpleQueue[tuple[int, bool]] = SimpleQueue()  # which a replay cannot put back, unlike a list

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        for step in range(POISONED + 2):
            optimizer.zero_grad()
            out = model(torch.randn(BATCH, WIDTH))
            out.register_hook(partial(look, step))
            loss = scaler.scale(F.mse_loss(out, torch.zeros(BATCH, WIDTH)))
            if step == POISONED:
                loss = loss * float("inf")
            with _deterministic():
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        return model

    def look(step: int, _: Tensor) -> None:
        seen.put((step, torch.are_deterministic_algorithms_enabled()))

    before = call_state.kernels_now()
    watched = train_both(loop, run_folder, every=0, replay_budget=0)
    assert call_state.kernels_now() == before
    assert watched.replay_of(POISONED)[0] == ReplayStatus.EXACT
    looked = [seen.get_nowait() for _ in range(seen.qsize())]
    assert all(deterministic for _, deterministic in looked)
    assert looked.count((POISONED, True)) == 3  # unwatched, watched, and run again


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_a_run_tells_the_settings_it_began_with(run_folder: Path) -> None:
    watched = train_both(lambda watch: train(watch, mlp()), run_folder)
    now = call_state.kernels_by_name(call_state.kernels_now())
    assert watched.run.manifest.configuration["kernels"] == json.loads(json.dumps(now))


def test_copies_lie_in_memory_as_the_tensors_do() -> None:
    models = Models([mlp()])
    guard = WriteGuard()
    copies = Substitutes(models, StateSnapshot(models), lambda tensor: tensor, guard)
    wide = torch.arange(40.0).half().reshape(4, 10)
    for tensor in (wide, wide.t(), wide[:, 1:], wide.flatten()[3:], wide[:, 2:7].t(), wide[:, :1].expand(4, 8)):
        copied = copies.of(tensor)
        assert torch.equal(copied, tensor)
        assert copied.data_ptr() % 64 == tensor.data_ptr() % 64
        assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert copied.stride() == tensor.stride()
    column = torch.randn(1000, 100)[:, 1]
    assert copies.of(column).untyped_storage().nbytes() == column.numel() * 4  # and not all that lies between


@pytest.mark.parametrize("writes", [True, False])
def test_an_input_too_large_to_copy_is_not_overwritten_twice(
    writes: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Halving(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5) if writes else x * 0.5)

    def loop(watch: Callable[..., object]) -> Any:
        batches: list[Tensor] = []

        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            batches.append(x)
            return mse(model, x, y)

        return [train(watch, Halving(), forward), batches]

    monkeypatch.setattr(substitutes, "COPIED_BYTES", 8)
    status, reason = train_both(loop, run_folder).replay_of(POISONED)
    assert status == (ReplayStatus.UNAVAILABLE if writes else ReplayStatus.EXACT)
    assert ("an input was changed in place since" in reason) is writes
