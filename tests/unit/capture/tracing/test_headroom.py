"""A value on its way to overflow is told before it gets there, once; what only looks like one is not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.capture.record.terminal import MAX_AHEAD
from ampscope.capture.torch_support import guard
from ampscope.trace.schema import EventKind, Table
from ampscope.trace.vocabulary import RANGE_ALARMS

GROWTH = 1.04  #: a step
STEPS = 165  #: about half the way
Alarms = list[tuple[int, str]]


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of AMPscope's own ends the test."""
    monkeypatch.setattr(guard, "RAISE", True)


class Net(nn.Module):
    """Multiplies what it computes by a gain, and does something with that."""

    gain: Tensor

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("gain", torch.ones(()))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.gain.half()
        return self.last(self.then(hidden))


def normed(hidden: Tensor) -> Tensor:
    return F.layer_norm(hidden.float(), (6,))


@pytest.fixture
def alarms(watch: Callable[..., ampscope.Scope]) -> Callable[..., Alarms]:
    def look(
        gain: Callable[[int], float], steps: int, then: Callable[[Tensor], Tensor] = normed, **options: Any
    ) -> Alarms:
        torch.manual_seed(0)
        net = Net(then)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scope = watch(net, **options)
        x, y = torch.randn(8, 6), torch.randint(0, 2, (8,))
        for step in range(steps):
            net.gain.fill_(gain(step))
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(net(x + 0.1 * torch.randn(8, 6)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scope.close()
        events = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.NOTE)
        return [(row.step, row.text) for row in events if row.text.startswith(RANGE_ALARMS)]

    return look


@pytest.mark.parametrize("options", [{}, {"every": 5}], ids=str)
def test_growth_is_told_in_time_with_the_step_at_which_it_ends(
    alarms: Callable[..., Alarms], capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    found = alarms(lambda step: GROWTH**step, STEPS, quiet=False, **options)
    step, text = found[0]
    assert text.startswith("overflow ahead: aten.mul.Tensor")
    expected, low, high = map(int, re.findall(r"\d+", text.rpartition("at about step ")[2]))
    assert abs(expected - step) > 100, "it is told long before"
    assert low <= expected <= high
    assert abs(expected - _overflow()) < 0.2 * _overflow()
    assert len(found) == len({text.partition(" gives ")[0] for _, text in found}), "each place once"
    told = [line for line in capsys.readouterr().err.splitlines() if "overflow ahead" in line]
    assert 1 <= len(told) <= MAX_AHEAD
    assert "Look: ampscope diagnose" in told[0]


def _overflow() -> int:
    """The step at which the growth reaches float16's end, of what is about 2 at the beginning."""
    return round(math.log(65504 / 2) / math.log(GROWTH))


def test_what_is_near_and_moves_is_told(alarms: Callable[..., Alarms]) -> None:
    found = alarms(lambda _: 20_000.0, 40)
    assert found
    assert all(text.startswith("near overflow: aten.mul.Tensor") for _, text in found)


@pytest.mark.parametrize(
    ("gain", "then"),
    [
        pytest.param(lambda _: 1.0, normed, id="nothing grows"),
        pytest.param(lambda step: min(GROWTH**step, 8.0), normed, id="growth that has ended"),
        pytest.param(lambda step: 500.0 / GROWTH**step, normed, id="falling"),
        pytest.param(lambda _: 20_000.0, torch.tanh, id="a function that saturates reads it"),
        pytest.param(
            lambda _: 1.0,
            lambda hidden: normed(hidden) * hidden.masked_fill(hidden > -1e4, -65504.0).softmax(-1),
            id="a mask at the very end of the dtype",
        ),
    ],
)
def test_what_will_not_overflow_is_not_told(
    alarms: Callable[..., Alarms], gain: Callable[[int], float], then: Callable[[Tensor], Tensor]
) -> None:
    assert alarms(gain, 140, then) == []


def test_a_loss_scale_that_grows_is_not_told(watch: Callable[..., ampscope.Scope]) -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)
    scope = watch(net, scaler, every=1)
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(torch.randn(8, 6))
        loss = F.cross_entropy(out.float(), torch.randint(0, 2, (8,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scope.close()
    events = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.NOTE)
    assert [row.text for row in events if row.text.startswith(RANGE_ALARMS)] == []
