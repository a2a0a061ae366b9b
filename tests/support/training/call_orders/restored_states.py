"""States of scalers and optimizers that are restored, or forgotten."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import RIGHT, WRONG, wrong
from tests.support.training.small_loop import here
from tests.support.training.usage_bench import (
    STEPS,
    Bench,
    Watch,
)

HIGH = 2.0**20


def resumed(watch: Watch, *, restore: bool, renew: bool) -> Any:
    """Two stretches of training with a new scaler for the second; ``renew`` makes a new optimizer too."""
    bench = Bench(watch, scale=HIGH, optimizer=torch.optim.Adam)
    for _ in bench.steps(2 * STEPS):
        pass
    states = copy.deepcopy((bench.scaler.state_dict(), bench.optimizer.state_dict()))
    bench.scaler = torch.amp.GradScaler(here(), init_scale=HIGH)
    if restore:
        bench.scaler.load_state_dict(states[0])
    if renew:
        bench.optimizer = torch.optim.Adam(bench.parameters, lr=1e-3)
        bench.optimizer.load_state_dict(states[1])
    for _ in bench.steps():
        pass
    return bench.state


for renew in (False, True):
    told = "a new optimizer" if renew else "the old optimizer"
    RIGHT[f"the scaler restored with {told}"] = partial(resumed, restore=True, renew=renew)
    WRONG[f"the scaler forgotten with {told}"] = (
        partial(resumed, restore=False, renew=renew),
        Cause.MISUSE_SCALER_STATE_NOT_RESTORED,
        2 * STEPS,
    )


def anew(watch: Watch, *, together: int) -> Any:
    """A scaler is made for every so many steps."""
    bench = Bench(watch)
    for _ in range(4):
        for _ in bench.steps(together):
            pass
        bench.scaler = torch.amp.GradScaler(here(), init_scale=4096.0)
    return bench.state


RIGHT["a scaler for each epoch, whose scale stays"] = partial(anew, together=2)
WRONG["a scaler for each step"] = partial(anew, together=1), Cause.MISUSE_SCALER_EACH_STEP, 0


@wrong(Cause.MISUSE_SCALER_EACH_STEP)
def a_scaler_for_each_step_of_two_optimizers(watch: Watch) -> None:
    bench = Bench(watch)
    halves = [torch.optim.SGD(part, lr=1e-3) for part in (bench.parameters[:2], bench.parameters[2:])]
    for _ in range(4):
        bench.scaled()
        for half in halves:
            bench.scaler.step(half)
        bench.scaler.update()
        bench.scaler = torch.amp.GradScaler(here(), init_scale=4096.0)


def resumed_elsewhere(watch: Watch, *, restore: bool) -> Any:
    """A fresh process, as far as watch can tell: it sees the second stretch only."""
    first = Bench(lambda *_: None, scale=HIGH, optimizer=torch.optim.Adam)
    for _ in first.steps(2 * STEPS):
        pass
    states = copy.deepcopy([part.state_dict() for part in first.state])
    seen: list[Any] = []
    bench = Bench(lambda *given: seen.extend(given), scale=HIGH, optimizer=torch.optim.Adam)
    for part, state in zip(bench.state[: 3 if restore else 2], states, strict=False):
        part.load_state_dict(state)
    watch(*seen)
    for _ in bench.steps():
        pass
    return bench.state


RIGHT["the scaler restored in a fresh process"] = lambda watch: resumed_elsewhere(watch, restore=True)
WRONG["the scaler forgotten in a fresh process"] = (
    lambda watch: resumed_elsewhere(watch, restore=False),
    Cause.MISUSE_SCALER_STATE_NOT_RESTORED,
    0,
)
