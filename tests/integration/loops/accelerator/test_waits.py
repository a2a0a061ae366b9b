"""Where the host waits for the device: in steps that are not traced, where it does unwatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from tests.support.training.accelerator import fake_device
from tests.support.training.accelerator.fake_device import TYPE, Count
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler

pytestmark = pytest.mark.accelerator

#: The first steps are traced, and of those that follow a sample.
STEPS, TRACED, SAMPLES = 55, 10, frozenset({16, 32, 48})
Waits = list[Counter[Count]]


class Run:
    """A model with batch normalisation, ready to be trained."""

    def __init__(self, *, scaled: bool, fused: bool = False, normalised: int = 1) -> None:
        norms = (nn.BatchNorm1d(WIDTH) for _ in range(normalised))
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *norms, nn.Linear(WIDTH, WIDTH)).to(TYPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused)
        self.scaler = make_scaler(device=TYPE, enabled=scaled, growth_interval=1000)
        self.dtype = torch.float16 if scaled else torch.bfloat16

    def loss(self) -> Tensor:
        x = torch.randn(BATCH, WIDTH, device=TYPE)
        with torch.autocast(TYPE, dtype=self.dtype):
            return F.mse_loss(self.model(x), x)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clipped(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def by_closure(self) -> None:
        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss  # type: ignore[return-value]  # as everyone writes it

        self.optimizer.step(closure)


def counted(
    loop: tuple[Callable[[], Run], Callable[[Run], None]], folder: Path | None, *, since: int = TRACED
) -> Waits:
    """What the steps do that are not traced, each; watched into ``folder``, and from the first on if none is."""
    make, step = loop
    torch.manual_seed(0)
    run, found = make(), []
    every: dict[str, Any] = {} if since else {"every": 0}
    scope = ampscope.watch(run.model, run.scaler, dir=folder, quiet=True, **every) if folder is not None else None
    for number in range(STEPS):
        before = fake_device.counts()
        with fake_device.waits_noted() as noted:
            step(run)
        found.append(fake_device.counts() - before)
        if scope is not None and number >= since:
            print(number, *noted, sep="\n  ")  # noqa: T201  # shown where the test fails
    if scope is not None:
        scope.close()
    return (
        found if not since else [each for number, each in enumerate(found) if number not in (*range(since), *SAMPLES)]
    )


def waits(found: Waits) -> list[dict[Count, int]]:
    return [{which: number for which, number in each.items() if which in fake_device.WAITS} for each in found]


LOOPS: dict[str, tuple[Callable[[], Run], Callable[[Run], None]]] = {
    "a scaler": (partial(Run, scaled=True), Run.step),
    "a scaler, and clipping": (partial(Run, scaled=True), Run.clipped),
    "a scaler, fused": (partial(Run, scaled=True, fused=True), Run.step),
    "no scaler": (partial(Run, scaled=False), Run.step),
    "a closure": (partial(Run, scaled=False), Run.by_closure),
}


@pytest.mark.parametrize("name", ["a scaler", "a scaler, and clipping"])
def test_a_scalers_loop_waits_where_its_scaler_does(name: str, run_folder: Path) -> None:
    """Even where the device never catches up."""
    with fake_device.latency(fake_device.NEVER):
        assert waits(counted(LOOPS[name], run_folder)) == waits(counted(LOOPS[name], None))


@pytest.mark.parametrize("name", ["a scaler", "a scaler, and clipping"])
def test_the_first_steps_wait_no_more_than_others(name: str, run_folder: Path) -> None:
    """In them it is learned what the forward pass writes into, and which buffers are not finite on purpose."""
    with fake_device.latency(fake_device.NEVER):
        assert waits(counted(LOOPS[name], run_folder, since=0)) == waits(counted(LOOPS[name], None, since=0))


@pytest.mark.parametrize("name", ["no scaler", "a closure", "a scaler, fused"])
def test_without_a_wait_of_the_loops_own_one_event_is_waited_for(name: str, run_folder: Path) -> None:
    """The gradients' norm before the weights move, or, fused, the decision of the step before they move again."""
    with fake_device.latency(fake_device.NEVER):
        alone, watched = waits(counted(LOOPS[name], None)), waits(counted(LOOPS[name], run_folder))
    assert alone == [{}] * len(alone)
    looked_at = {50 - TRACED - len(SAMPLES)} if name == "a scaler, fused" else set()
    extra = [each for step, each in enumerate(watched) if step not in looked_at]
    known = len(SAMPLES) if name == "a scaler, fused" else 0  # after a sample, which has waited for the decision
    assert [each for each in extra if each] == [{Count.EVENTS: 1}] * (len(extra) - known)
    assert all(sum(watched[step].values()) == 2 for step in looked_at)


@pytest.mark.parametrize("name", ["no scaler", "a closure"])
def test_a_device_that_keeps_up_is_not_waited_for(name: str, run_folder: Path) -> None:
    found = waits(counted(LOOPS[name], run_folder))
    assert found == [{}] * (STEPS - TRACED - len(SAMPLES))


def test_many_buffers_are_measured_in_few_launches(run_folder: Path) -> None:
    make = partial(Run, scaled=True, normalised=53)
    alone, watched = counted((make, Run.step), None), counted((make, Run.step), run_folder)
    extra = [more[Count.LAUNCHES] - few[Count.LAUNCHES] for few, more in zip(alone, watched, strict=True)]
    assert sorted(extra)[len(extra) // 2] < 53
