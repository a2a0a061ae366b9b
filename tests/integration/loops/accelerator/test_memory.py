"""What a replay takes of the device's memory, and when it is given back."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.isolation import memory
from tests.support.training.accelerator import fake_device
from tests.support.training.accelerator.fake_device import TYPE
from tests.support.training.small_loop import WIDTH, make_scaler

pytestmark = pytest.mark.accelerator

ROWS, CLASSES = 64, 512
#: The results of one micro-batch.
LOGITS_BYTES = 4 * ROWS * CLASSES
BAD = 2
#: Of a frozen weight, many times as large as what a call gives.
BASE_ROWS = 1 << 20
BASE_BYTES = 4 * BASE_ROWS * WIDTH
#: All that the model has given.
GIVEN: list[weakref.ref[Tensor]] = []


class Classifier(nn.Module):
    """Runs out of memory in calls of this number and later."""

    def __init__(self, *, out_of_memory_at: int = 1 << 30) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.calls_left = [out_of_memory_at]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        self.calls_left[0] -= 1
        if self.calls_left[0] < 0:
            raise torch.OutOfMemoryError("there is no more of it")
        GIVEN.append(weakref.ref(logits))
        return logits


class Adapted(Classifier):
    """Beside what it trains it has a frozen base, many times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Embedding(BASE_ROWS, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x) + self.base(x[:, 0].long().abs()).mean(1, keepdim=True)
        return logits


def judged(model: Classifier, folder: Path, *, micro_batches: int) -> int:
    """The most memory that judging a bad step took, beyond what there was."""
    model = model.to(TYPE)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler(device=TYPE)
    with ampscope.watch(model, scaler, dir=folder, every=0, quiet=True):
        for step in range(BAD + 1):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                loss = model(torch.randn(ROWS, WIDTH, device=TYPE)).square().mean()
                scaler.scale(loss * (torch.inf if step == BAD else 1.0)).backward()
            with fake_device.most_allocated() as most:
                scaler.step(optimizer)
            scaler.update()
    return most[0]


def test_micro_batches_are_not_kept_together(run_folder: Path) -> None:
    one = judged(Classifier(), run_folder.with_name("one"), micro_batches=1)
    many = judged(Classifier(), run_folder.with_name("many"), micro_batches=8)
    assert many < one + 3 * LOGITS_BYTES


def test_frozen_weights_are_there_once(run_folder: Path) -> None:
    plain = judged(Classifier(), run_folder.with_name("plain"), micro_batches=1)
    adapted = judged(Adapted(), run_folder.with_name("adapted"), micro_batches=1)
    assert adapted < plain + BASE_BYTES // 4


def test_what_a_replay_holds_goes_before_the_allocators_reserve(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    model = Classifier(out_of_memory_at=8 * (BAD + 1) + 6)
    monkeypatch.setattr(memory, "give_back", lambda _: alive.append(sum(each() is not None for each in GIVEN)))
    judged(model, run_folder, micro_batches=8)
    assert alive == [0]
