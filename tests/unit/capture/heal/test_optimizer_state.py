"""Optimizer state that is not finite is mended before a step is made with it; what would overflow is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Incident
from ampscope.trace.schema import CureKind, EventKind, Table
from ampscope.trace.vocabulary import Cause
from tests.support.training.small_loop import WIDTH
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]
Spoil = Callable[[torch.optim.Optimizer, Any], object]

STEPS, BAD_STEP = 160, 20
NEAR = 0.02


def adamw(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 3e-3, **options)


def amsgrad(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 3e-3, amsgrad=True, foreach=False)


def fused(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return adamw(parameters, fused=True)


def momentum(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def element(key: str, value: float) -> Spoil:
    def spoil(optimizer: torch.optim.Optimizer, weight: Any) -> None:
        optimizer.state[weight][key][0, 0] = value

    return spoil


def whole(key: str, value: float) -> Spoil:
    return lambda optimizer, weight: optimizer.state[weight][key].fill_(value)


def unseen(key: str, value: float) -> Spoil:
    """As memory turns bad: no change counter tells."""

    def spoil(optimizer: torch.optim.Optimizer, weight: Any) -> None:
        optimizer.state[weight][key].data[0, 0] = value

    return spoil


def nothing(*_: object) -> None:
    """Nothing is spoilt."""


def train(
    watch: Callable[..., object],
    make: Callable[[Iterable[Any]], torch.optim.Optimizer],
    *,
    scaled: bool,
    before: Spoil = nothing,
    after_backward: Spoil = nothing,
) -> tuple[float, Any, torch.optim.Optimizer]:
    """Returns the mean loss of the last steps, the model and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**8)
    watch(model, scaler)
    torch.manual_seed(1)
    losses: list[Tensor] = []
    for step in range(STEPS):
        x = torch.randn(16, WIDTH)
        y = x.roll(1, 1) + torch.randn(16, WIDTH)  # the noise is the loss that remains
        if step == BAD_STEP:
            before(optimizer, model[2].weight)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step == BAD_STEP:
            after_backward(optimizer, model[2].weight)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return float(torch.stack(losses[-20:]).mean()), model, optimizer


def healing(watch: Watch, scopes: list[ampscope.Scope]) -> Callable[..., None]:
    return lambda model, scaler: scopes.append(watch(model, scaler, heal=True))


def all_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    state = (value for kept in optimizer.state.values() for value in kept.values())
    return all(bool(each.isfinite().all()) for each in (*model.parameters(), *state) if isinstance(each, Tensor))


POISONED = [
    pytest.param(adamw, element("exp_avg", math.nan), False, id="first moment"),
    pytest.param(adamw, element("exp_avg_sq", math.inf), False, id="second moment"),
    pytest.param(adamw, whole("exp_avg_sq", math.nan), True, id="all of a second moment"),
    pytest.param(amsgrad, element("max_exp_avg_sq", math.inf), False, id="largest second moment"),
    pytest.param(fused, element("exp_avg", -math.inf), False, id="fused"),
    pytest.param(momentum, element("momentum_buffer", math.nan), False, id="momentum"),
    pytest.param(momentum, whole("momentum_buffer", math.inf), True, id="all of a momentum"),
]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("make", "spoil", "is_anew"), POISONED)
def test_poisoned_state_is_mended_before_it_moves_a_weight(
    watch: Watch, make: Any, spoil: Spoil, is_anew: bool, scaled: bool
) -> None:
    scopes: list[ampscope.Scope] = []
    loss, model, optimizer = train(healing(watch, scopes), make, scaled=scaled, before=spoil)
    well, *_ = train(nothing, make, scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["step"], told["kind"], told["modules"]) == (BAD_STEP, CureKind.STATE, ["2.weight"])
    assert told["mended"][0]["elements"] == (0 if is_anew else 1)
    assert all_finite(model, optimizer)
    assert loss == pytest.approx(well, rel=NEAR)


def test_the_incident_is_told_with_what_was_done(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    train(healing(watch, scopes), adamw, scaled=False, before=element("exp_avg", math.nan))
    scopes[0].close()
    diagnosis = ampscope.diagnose(scopes[0].folder)
    assert diagnosis.primary is not None
    assert (diagnosis.primary.cause, diagnosis.primary.step) == (Cause.BAD_OPTIMIZER_STATE, BAD_STEP)
    assert "held 1 NaN among 128 elements before the update of step 20" in diagnosis.primary.explanation
    assert "has not come back" in diagnosis.since


def test_state_that_a_later_look_finds_is_mended_before_the_next_step(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    _, model, optimizer = train(healing(watch, scopes), adamw, scaled=True, before=unseen("exp_avg_sq", math.inf))
    (told,) = cures(scopes[0])
    assert told["kind"] == CureKind.STATE
    assert told["step"] == 33  # the look after step 32 has found it
    assert all_finite(model, optimizer)
    assert "has not come back" in ampscope.diagnose(scopes[0].folder).since


def test_state_that_comes_with_a_checkpoint_is_mended_before_the_first_step(watch: Watch) -> None:
    _, _, before = train(nothing, adamw, scaled=True)
    saved = before.state_dict()
    saved["state"][2]["exp_avg"][0, 0] = math.nan

    def resumed(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.load_state_dict(saved)
        return optimizer

    scopes: list[ampscope.Scope] = []
    _, model, optimizer = train(healing(watch, scopes), resumed, scaled=True)
    (told,) = cures(scopes[0])
    assert (told["step"], told["kind"]) == (0, CureKind.STATE)
    assert all_finite(model, optimizer)


def enlarge(_: object, weight: Any) -> None:
    weight.grad[0, 0] = 1e23


@pytest.mark.parametrize("make", [adamw, fused])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_whose_squares_overflow_is_left_out(watch: Watch, make: Any, scaled: bool) -> None:
    scopes: list[ampscope.Scope] = []
    loss, model, optimizer = train(healing(watch, scopes), make, scaled=scaled, after_backward=enlarge)
    well, *_ = train(nothing, make, scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["step"], told["kind"]) == (BAD_STEP, CureKind.LEFT_OUT)
    assert "exp_avg_sq of 2.weight" in told["text"]
    assert all_finite(model, optimizer)
    assert loss == pytest.approx(well, rel=NEAR)
    primary = ampscope.diagnose(scopes[0].folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.step, primary.op) == (Cause.BAD_OPTIMIZER_STATE, BAD_STEP, "aten.addcmul_.default")
    assert "would hold 1 inf" in primary.explanation


def notes(scope: ampscope.Scope) -> list[str]:
    return [row.text for row in ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.NOTE)]


def test_state_whose_step_could_not_be_left_out_is_mended_before_the_next(watch: Watch) -> None:
    def hooked(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(nothing)
        return optimizer

    scopes: list[ampscope.Scope] = []
    _, model, optimizer = train(healing(watch, scopes), hooked, scaled=True, after_backward=enlarge)
    reason = "functions of the loop's own run with its optimizer and may need the gradients"
    assert notes(scopes[0])[0] == f"not healed: {reason}"
    assert [(each["step"], each["kind"]) for each in cures(scopes[0])] == [(BAD_STEP + 1, CureKind.STATE)]
    assert all_finite(model, optimizer)


class Smallest(torch.optim.Optimizer):
    """Moves by the smallest gradient of each element so far, which begins at infinity, and counts its steps."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"smallest": torch.full_like(parameter, math.inf), "steps": 5}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            before = state.setdefault("smallest", torch.full_like(parameter, math.inf))
            state["smallest"] = torch.minimum(before, parameter.grad.abs())
            parameter.sub_(parameter.grad.sign() * state["smallest"], alpha=self.param_groups[0]["lr"])


def test_state_that_begins_at_infinity_and_does_not_stay_there_is_left_alone(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = train(healing(watch, scopes), Smallest, scaled=False)
    assert cures(scopes[0]) == []
    assert [state["steps"] for state in healed[2].state.values()] == [5 + STEPS] * 4
    twin = train(nothing, Smallest, scaled=False)
    assert exact_state(healed[1].state_dict()) == exact_state(twin[1].state_dict())
    scopes[0].close()
    assert ampscope.diagnose(scopes[0].folder).primary is None


def test_sparse_gradients_that_are_large_do_not_end_healing(watch: Watch) -> None:
    table = nn.Embedding(8, WIDTH, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    scope = watch(table, heal=True)
    for step in range(6):
        if step == 4:
            optimizer.state[table.weight]["exp_avg"][0, 0] = math.nan
        optimizer.zero_grad()
        (table(torch.arange(4)).square().sum() * (1e21 if step == 2 else 1.0)).backward()
        optimizer.step()
    assert "cannot be stepped on copies first" in notes(scope)[-1]


def test_it_is_told_where_an_optimizer_cannot_be_stepped_on_copies(watch: Watch) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    scope = watch(model, heal=True)
    for step in range(3):
        if step == 2:
            optimizer.state[model.weight]["d"][0] = math.inf
        x = torch.randn(8, WIDTH)

        def closure(given: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(given), given.roll(1, 1))
            loss.backward()
            return loss

        optimizer.step(closure)
    scope.close()
    told = "not healed: d of weight cannot be mended: its optimizer cannot be stepped on copies first"
    assert notes(scope)[0] == told  # what the weights make of it comes after


def test_large_gradients_whose_squares_fit_are_left_alone(watch: Watch) -> None:
    def large(_: object, weight: Any) -> None:
        weight.grad[0, 0] = 1e18

    scopes: list[ampscope.Scope] = []
    healed = train(healing(watch, scopes), adamw, scaled=True, after_backward=large)
    assert cures(scopes[0]) == []
    twin = train(nothing, adamw, scaled=True, after_backward=large)
    assert exact_state(healed[1].state_dict()) == exact_state(twin[1].state_dict())


def test_weights_that_are_lost_are_not_made_up(watch: Watch) -> None:
    def spoil(optimizer: torch.optim.Optimizer, weight: Any) -> None:
        element("exp_avg", math.nan)(optimizer, weight)
        with torch.no_grad():
            weight[0] = math.nan

    scopes: list[ampscope.Scope] = []
    _, model, _ = train(healing(watch, scopes), adamw, scaled=False, before=spoil)
    assert {told["kind"] for told in cures(scopes[0])} == {CureKind.LEFT_OUT}
    assert not model[2].weight.isfinite().all()
