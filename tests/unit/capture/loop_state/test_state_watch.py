"""What outlives a step is looked at: what is not finite is told with when it was finite last, and never healthy."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.capture.events import StepAttempt
from ampscope.capture.loop_state import held_state, state_watch
from ampscope.capture.loop_state.held_state import StateHistory, StateLooks, WrittenState
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import StateKind
from ampscope.trace.vocabulary import Cause, Verdict

Change = Callable[[nn.Module, torch.optim.Optimizer], object]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def diagnosed(
    folder: Path, change: Change, *, at: int = 3, steps: int = 4, made: Callable[[], nn.Module] = net, **options: Any
) -> Diagnosis:
    """A loop with ``change`` made to model and optimizer after step ``at``, of which nothing else is amiss."""
    torch.manual_seed(0)
    model = made()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    with ampscope.watch(model, dir=folder, quiet=True, **options):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if step == at:
                change(model, optimizer)
    return ampscope.diagnose(folder)


def state_of(optimizer: torch.optim.Optimizer, key: str) -> Tensor:
    """That of the last weight matrix."""
    parameter = optimizer.param_groups[0]["params"][-2]
    found: Tensor = optimizer.state[parameter][key]
    return found


def spoil(value: float, pick: Callable[[nn.Module, torch.optim.Optimizer], Tensor]) -> Change:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            pick(model, optimizer).view(-1)[0] = value

    return change


LATE: dict[str, tuple[Change, Cause, str, str]] = {
    "second moment": (
        spoil(math.inf, lambda _, optimizer: state_of(optimizer, "exp_avg_sq")),
        *(Cause.BAD_OPTIMIZER_STATE, "2", "exp_avg_sq (float32), which the optimizer keeps of 2.weight, held 1 inf"),
    ),
    "weight": (
        spoil(math.nan, lambda model, _: model.get_parameter("2.weight")),
        *(Cause.BAD_WEIGHT, "2", "The parameter 2.weight (float32) held 1 NaN among 4 elements after step 3"),
    ),
    "buffer": (
        spoil(math.inf, lambda model, _: model.get_buffer("1.running_var")),
        *(Cause.BAD_BUFFER, "1", "The buffer 1.running_var (float32) held 1 inf"),
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_went_bad_after_the_last_step_is_found_as_the_run_ends(name: str, run_folder: Path) -> None:
    change, cause, module, says = LATE[name]
    diagnosis = diagnosed(run_folder, change)
    primary = diagnosis.primary
    assert diagnosis.verdict is Verdict.PROBLEM
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.module, primary.step) == (cause, module, 3)
    assert says in primary.explanation


def test_a_frozen_moment_is_found_while_the_run_goes_on(run_folder: Path) -> None:
    """Every value of the loop stays finite: the update is divided by infinity."""
    change = LATE["second moment"][0]
    diagnosis = diagnosed(run_folder, change, at=2, steps=10)
    (incident,) = diagnosis.incidents
    assert (incident.cause, incident.step, incident.phase) == (Cause.BAD_OPTIMIZER_STATE, 4, "optimizer")
    assert "It was finite after step 2; in between nobody looked." in incident.explanation


def test_what_a_known_failure_left_behind_is_not_told_twice(run_folder: Path) -> None:
    def poison(model: nn.Module, _: torch.optim.Optimizer) -> None:
        model.register_forward_pre_hook(lambda _module, args: (args[0] * math.inf,))

    diagnosis = diagnosed(run_folder, poison, at=4, steps=7)
    assert isinstance(diagnosis.primary, Incident)
    assert diagnosis.primary.step == 5
    assert Cause.BAD_OPTIMIZER_STATE not in {each.cause for each in diagnosis.incidents}


class Masked(nn.Module):
    """Holds infinities on purpose: a mask as a buffer, a frozen bias, a parameter that is not used."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.bias = nn.Parameter(torch.tensor([-math.inf]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class KeepsBest(torch.optim.Adam):
    """Keeps numbers that begin at infinity beside each weight."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("best", torch.tensor(math.inf))


def test_infinities_on_purpose_are_left_alone(run_folder: Path) -> None:
    diagnosis = diagnosed(run_folder, lambda *_: None, made=Masked)
    assert (diagnosis.verdict, diagnosis.incidents) == (Verdict.HEALTHY, ())


def test_single_numbers_beside_a_weight_may_be_infinite() -> None:
    model = net()
    optimizer = KeepsBest(model.parameters(), 1e-3)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    found = {each.name for each in held_state.optimizer_state(optimizer, Models([model]))}
    assert found == {"exp_avg", "exp_avg_sq"}


def test_looks_are_rare() -> None:
    assert [step for step in range(200) if state_watch.is_due(step)] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]


def test_the_largest_magnitude_of_any_tensor() -> None:
    long = torch.arange(5000.0)
    tensors = [torch.tensor([1.0, -3.0]), long, -long, torch.tensor(2.0, dtype=torch.float16)]
    assert [float(each) for each in held_state.largest(tensors)] == [3, 4999, 4999, 2]
    for value in (math.nan, math.inf, -math.inf):
        long[7] = value
        assert not math.isfinite(float(held_state.largest([long])[0]))


# -- carried tensors ------------------------------------------------------------------------------------------------


def written() -> tuple[WrittenState, StateHistory]:
    history = StateHistory()
    return WrittenState(Models([net()]), history, Guard("the test", print)), history


def test_a_carried_tensor_is_told_once_with_the_step_before() -> None:
    watch, history = written()
    bank = torch.zeros(4)
    watch.start()
    watch.carry("bank", bank)
    watch.send(0)
    assert watch.turned_bad() == []
    bank[1] = math.inf
    watch.send(1)
    (found,) = watch.turned_bad()
    assert (found.kind, found.key, found.module) == (StateKind.CARRIED, "bank", "")
    assert history.of(found) == StateLooks(0, 1)
    watch.send(2)
    assert watch.turned_bad() == []
    assert [each.key for each in watch.now_bad()] == ["bank"]


def test_a_large_carried_tensor_is_measured_when_it_was_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = written()
    bank = torch.zeros(1 << 17)
    watch.carry("bank", bank)
    measured: list[int] = []
    largest = held_state.largest

    def counted(tensors: list[Tensor]) -> list[Tensor]:
        measured.append(sum(each.numel() > 1 << 16 for each in tensors))
        return largest(tensors)

    monkeypatch.setattr("ampscope.capture.loop_state.held_state.largest", counted)
    for step in range(4):
        if step == 2:
            bank[0] = 1.0
        watch.send(step)
        watch.turned_bad()
    assert measured == [1, 0, 1, 0]


def test_a_carried_tensor_is_not_kept_alive() -> None:
    watch, _ = written()
    bank = torch.zeros(4)
    gone = weakref.ref(bank)
    watch.carry("bank", bank)
    watch.send(0)
    watch.turned_bad()
    del bank
    gc.collect()
    assert gone() is None
    watch.send(1)
    assert watch.now_bad() == []


def test_the_diagnosis_counts_the_looks_that_were_taken(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    take = state_watch.StateWatch.look

    def look(self: state_watch.StateWatch, attempt: StepAttempt) -> None:
        looked.append(attempt.step)
        take(self, attempt)

    monkeypatch.setattr(state_watch.StateWatch, "look", look)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ampscope.watch(model, dir=run_folder, quiet=True):
        for _ in range(70):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
    checked = ampscope.diagnose(run_folder).checked
    assert (checked.state_looks, checked.gradients) == (len(looked) + 1, 70)  # and once more at the end


@pytest.mark.parametrize("bad", [False, True])
def test_weights_are_looked_at_a_last_time_when_their_optimizer_is_gone(bad: bool, tmp_path: Path) -> None:
    model = net()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    with ampscope.watch(model, dir=tmp_path / "run", quiet=True):
        train()
        gc.collect()
        if bad:
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan
    found = ampscope.diagnose(tmp_path / "run")
    if bad:
        assert isinstance(found.primary, Incident)
        assert (found.primary.cause, found.primary.tripped) == (Cause.BAD_WEIGHT, ("0.weight",))
    else:
        assert found.verdict == Verdict.HEALTHY
