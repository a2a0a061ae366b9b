"""Whatever a scaler is told to step is an optimizer, and the scaler knows what it has skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ampscope
from ampscope.trace.schema import EventKind, ScalerAction, Table
from tests.support.training.small_loop import POISONED, STEPS, here, make_batch, make_scaler, mlp, mse, poison
from tests.support.training.twin_runs import EXACT, train_both

RATE = 0.01


def descend(parameters: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.sub_(RATE * parameter.grad)


class Handed:
    """No optimizer of torch's, but has groups; moves the weights itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        descend(parameter for group in self.param_groups for parameter in group["params"])


class Slotted:
    """Cannot be referred to weakly."""

    __slots__ = ("param_groups",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        descend(parameter for group in self.param_groups for parameter in group["params"])


class Delegates:
    """Has another optimizer step, and is asked for its groups and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __len__(self) -> int:
        return 0

    def step(self) -> None:
        self.optimizer.step()


class Derived(torch.optim.Optimizer):
    """An optimizer by its class, which never ran the constructor by which torch hears of steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


class Asks:
    """Notes that it may step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.may = optimizer, False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [dict(group) for group in self.optimizer.param_groups]

    def step(self) -> None:
        self.may = True

    def step_if_it_may(self) -> None:
        may, self.may = self.may, False
        if may:
            self.optimizer.step()


class AsksForItself(Asks):
    """Moves the weights itself afterwards."""

    def step_if_it_may(self) -> None:
        if self.may:
            descend(parameter for group in self.param_groups for parameter in group["params"])
        self.may = False


class Several:
    """Has one optimizer for each parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.optimizers = [torch.optim.SGD([parameter], RATE) for parameter in parameters]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class WithoutGroups:
    """Tells nobody what it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class OwnScaler(torch.amp.GradScaler):
    """Looks at the gradients in its own way, and asks nothing of what it steps but to step."""

    def __init__(self, parameters: Iterable[Tensor], **options: Any) -> None:
        super().__init__(here(), **options)
        self.parameters = list(parameters)

    def step(self, optimizer: Any, *_: Any, **__: Any) -> None:
        factor = 1.0 / self.get_scale()
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad *= factor
        if all(bool(parameter.grad.isfinite().all()) for parameter in self.parameters if parameter.grad is not None):
            optimizer.step()
        else:
            self.skipped = True

    def update(self, new_scale: Any = None) -> None:
        if getattr(self, "skipped", False):
            super().update(self.get_scale() / 2)
        self.skipped = False


def trained(
    watch: Callable[..., object],
    make: Callable[[torch.optim.Optimizer], Any],
    *,
    anew: bool = False,
    unscale: bool = False,
    own_scaler: bool = False,
    bad: bool = True,
) -> dict[str, Any]:
    model = mlp()
    inner = torch.optim.Adam(model.parameters(), RATE)
    handed = make(inner)
    scaler = OwnScaler(model.parameters(), init_scale=2.0**8) if own_scaler else make_scaler()
    watch(model, scaler)
    scales = []
    for step in range(STEPS):
        model.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            loss = mse(model, *make_batch())
        scaled = scaler.scale(loss)
        (poison(step, scaled) if bad else scaled).backward()
        handed = make(inner) if anew else handed
        if unscale:
            scaler.unscale_(handed)
        scaler.step(handed)
        if hasattr(handed, "step_if_it_may"):
            handed.step_if_it_may()
        before = scaler.get_scale()
        scaler.update()
        scales.append((before, scaler.get_scale()))
    return {"model": model, "inner": inner, "scaler": scaler, "scales": scales}


KINDS = [Handed, Slotted, Delegates, Derived, Asks, AsksForItself, Several]
FOLLOWED = (Delegates, Derived, Asks)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled by the loop"])
@pytest.mark.parametrize("make", KINDS)
def test_steps_and_skips_are_the_scalers(make: type, unscale: bool, run_folder: Path) -> None:
    watched = train_both(lambda watch: trained(watch, make, unscale=unscale), run_folder)
    assert [(row.step, row.optimizer, row.skipped) for row in watched.steps] == [
        (step, 0, step == POISONED) for step in range(STEPS)
    ]
    assert all(row.grad_norm is not None for row in watched.steps)
    assert watched.replay_of(POISONED) == EXACT
    assert not watched.findings
    assert not watched.warnings
    skips = watched.run.rows(Table.SCALER_EVENTS, action=ScalerAction.SKIP)
    assert [(row.step, row.optimizer) for row in skips] == [(POISONED, 0)]
    told = [row.text for row in watched.run.rows(Table.EVENTS, kind=EventKind.NOTE) if make.__name__ in row.text]
    assert len(told) == (make not in (*FOLLOWED, Several))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("anew", [False, True], ids=["", "made anew"])
def test_a_run_without_skips_is_healthy(make: type, anew: bool, run_folder: Path) -> None:
    watched = train_both(lambda watch: trained(watch, make, anew=anew, bad=False), run_folder)
    assert [(row.step, row.optimizer, row.skipped) for row in watched.steps] == [(i, 0, False) for i in range(STEPS)]
    assert ampscope.diagnose(watched.run).verdict == "healthy"
    assert watched.warnings == []


@pytest.mark.parametrize("own_scaler", [False, True])
def test_one_that_tells_nobody_what_it_steps(own_scaler: bool, run_folder: Path) -> None:
    make = WithoutGroups if own_scaler else Delegates
    watched = train_both(lambda watch: trained(watch, make, own_scaler=own_scaler), run_folder)
    assert [row.skipped for row in watched.steps] == [step == POISONED for step in range(STEPS)]
    assert not watched.findings
    assert not watched.warnings


@pytest.mark.parametrize("make", FOLLOWED)
def test_the_state_of_the_optimizer_behind_it_is_looked_at(make: type, run_folder: Path) -> None:
    def spoilt(watch: Callable[..., object]) -> Any:
        result = trained(watch, make, bad=False)
        state = result["inner"].state[result["model"][0].weight]
        state["exp_avg_sq"][0, 0] = torch.inf
        return result

    (incident,) = train_both(spoilt, run_folder).incidents
    assert incident.bad_params == ("exp_avg_sq of 0.weight",)
