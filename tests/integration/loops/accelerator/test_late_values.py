"""What reaches the host late is judged all the same, and read when it is there, not before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.capture.torch_support.readback import Parcel
from ampscope.trace.schema import ReplayStatus, Trigger
from tests.support.training.accelerator import fake_device
from tests.support.training.accelerator.fake_device import TYPE
from tests.support.training.small_loop import BATCH, STEPS, WIDTH, make_scaler
from tests.support.training.twin_runs import Watched, train_both

pytestmark = pytest.mark.accelerator

ODD = 3
RATES = [0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125]


class Averaging(nn.Module):
    """Keeps an average of the largest input, which it never reads."""

    most: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: Tensor, largest: Tensor) -> Tensor:
        self.most.mul_(0.9).add_(largest, alpha=0.1)
        return self.layer(x)


def train(watch: Callable[..., object], *, largest: float = 1.0, added: float = 0.0, fused: bool = True) -> list[Any]:
    """The largest input, or the loss, of one step is another; its gradients are those of any step."""
    model = Averaging().to(TYPE)
    rate = torch.tensor(RATES[0], device=TYPE) if fused else RATES[0]
    optimizer, scaler = torch.optim.SGD(model.parameters(), rate, fused=fused), make_scaler(device=TYPE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    watch(model, scaler)
    for step in range(STEPS):
        x, most = torch.randn(BATCH, WIDTH, device=TYPE), torch.full((), largest if step == ODD else 1.0, device=TYPE)
        optimizer.zero_grad()
        with torch.autocast(TYPE, dtype=torch.float16):
            loss = F.mse_loss(model(x, most), x) + (added if step == ODD else 0.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return [model, optimizer, scaler]


def train_late(folder: Path, **options: Any) -> Watched:
    """Nothing is done on the device before somebody waits for it."""

    def loop(watch: Callable[..., object]) -> list[Any]:
        with fake_device.latency(fake_device.NEVER):
            return train(watch, **options)

    return train_both(loop, folder)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize(
    ("bad", "trigger"),
    [({"added": torch.nan}, Trigger.NONFINITE_LOSS), ({"largest": torch.inf}, Trigger.NONFINITE_BUFFER)],
    ids=["loss", "buffer"],
)
def test_a_step_is_bad_although_its_gradients_are_not(
    bad: dict[str, float], trigger: Trigger, fused: bool, run_folder: Path
) -> None:
    watched = train_late(run_folder, **bad, fused=fused)
    assert [(row.step, row.trigger) for row in watched.incidents] == [(ODD, trigger)]
    (row,) = watched.incidents
    assert row.replay == (ReplayStatus.UNAVAILABLE if fused else ReplayStatus.EXACT)
    assert ("after the optimizer had moved the weights" in row.replay_reason) is fused


def test_a_step_was_made_with_its_own_learning_rate(run_folder: Path) -> None:
    assert [row.lr for row in train_late(run_folder).steps] == pytest.approx(RATES)


@pytest.mark.parametrize("device", ["fake:0", "fake:1"])
def test_what_has_not_been_computed_has_not_arrived(device: str) -> None:
    """Whichever device is the current one."""
    with fake_device.latency(fake_device.NEVER):
        parcel = Parcel({"near": 1.0, "far": torch.full((), 2.0, device=device), "none": None})
        assert not parcel.arrived
        assert parcel.values() == {"near": 1.0, "far": 2.0, "none": None}
        assert parcel.arrived


def test_values_of_several_devices_and_dtypes_travel_together() -> None:
    values: dict[str, Tensor | float | None] = {
        "a": torch.tensor(1, device="fake:1"),
        "b": torch.tensor(2.0, device="fake:0", dtype=torch.float16),
        "c": torch.tensor(3.0),
        "d": torch.tensor(4, device="fake:1"),
    }
    with fake_device.latency(fake_device.NEVER):
        assert list(Parcel(values).values().items()) == [("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)]
