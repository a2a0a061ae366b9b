"""What a healed step must not do: wreck the weights, take gradients away, grow a scale, or be made by half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import CureKind, EventKind, Table
from tests.support.training.small_loop import WIDTH, make_batch
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, STEPS, Doubtful, Shifted, made, trained

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]


def healing(watch: Watch, scopes: list[ampscope.Scope]) -> Callable[..., None]:
    return lambda model, scaler: scopes.append(watch(model, scaler, heal=True))


def notes(scope: ampscope.Scope) -> str:
    scope.close()
    rows = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.NOTE)
    return "\n".join(row.text or "" for row in rows)


def nan_at(*steps: int) -> Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    def batch(step: int, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = given
        return (x * torch.nan if step in steps else x), y

    return batch


class Shouts(Doubtful):
    """What it returns, while it is armed, is finite in float32 alone, and of another size than ever before."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.second(x * 2.0**18 if self.armed else x))


@pytest.mark.parametrize("kind", [Shouts, Doubtful])
def test_a_step_is_not_made_with_gradients_far_from_those_of_good_steps(watch: Watch, kind: type[nn.Module]) -> None:
    scopes: list[ampscope.Scope] = []
    weights: list[Tensor] = []

    def before(model: Any, step: int) -> None:
        model.armed = step == BAD_STEP
        weights.append(model.first.weight.detach().clone())

    trained(made(kind), healing(watch, scopes), before=before)
    (told,) = cures(scopes[0])
    moved = not torch.equal(weights[BAD_STEP], weights[BAD_STEP + 1])
    assert told["applied"] == moved == (kind is Doubtful)


@pytest.mark.parametrize("bad", [(), (BAD_STEP,)])
def test_the_loop_finds_its_gradients_after_a_step_that_was_left_out(watch: Watch, bad: tuple[int, ...]) -> None:
    scopes: list[ampscope.Scope] = []
    left: list[bool] = []

    def before(model: Any, step: int) -> None:
        if step:
            left.append(all(parameter.grad is not None for parameter in model.parameters()))

    trained(made(Shifted), healing(watch, scopes), before=before, batch=nan_at(*bad), scaled=False)
    assert [told["kind"] for told in cures(scopes[0])] == [CureKind.LEFT_OUT] * len(bad)
    assert left == [True] * (STEPS - 1)


def test_a_step_that_was_left_out_does_not_count_for_the_growth_of_the_scale(watch: Watch) -> None:
    scalers: list[Any] = []
    scales: list[float] = []

    def heal(model: nn.Module, scaler: Any) -> None:
        scalers.append(scaler)
        watch(model, scaler, heal=True)

    def before(model: Any, step: int) -> None:
        scales.append(scalers[0].get_scale())

    trained(made(Shifted), heal, before=before, batch=nan_at(BAD_STEP), growth_interval=1)
    grown = [SCALE * 2.0**step for step in range(BAD_STEP + 1)]
    assert scales[: BAD_STEP + 1] == grown
    assert scales[BAD_STEP + 1] == grown[-1] / 2  # as of any skipped step, until the next begins
    assert scales[BAD_STEP + 2] == 2 * grown[-1]


@pytest.mark.parametrize("scaled", [True, False])
def test_a_failure_that_comes_again_is_left_out_again(watch: Watch, scaled: bool) -> None:
    scopes: list[ampscope.Scope] = []
    bad = (BAD_STEP, BAD_STEP + 3, BAD_STEP + 6)
    healed = trained(
        made(Shifted), healing(watch, scopes), before=lambda *_: None, batch=nan_at(*bad), scaled=scaled, steps=12
    )
    assert [(told["step"], told["kind"]) for told in cures(scopes[0])] == [(each, CureKind.LEFT_OUT) for each in bad]
    assert all(value.isfinite().all() for value in healed["model"].values())
    assert not scaled or healed["scaler"]["scale"] == SCALE


def two_optimizers(watch: Callable[..., object], *, scaled: bool, bad: int | None = BAD_STEP) -> list[list[Tensor]]:
    """Trains one model with two optimizers; returns the weights before each step and after the last."""
    model = made(Doubtful)
    parts = (model.first, nn.Sequential(model.second, model.last))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=SCALE)
    watch(model, scaler)
    torch.manual_seed(1)
    weights = []
    for step in range(STEPS):
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        x, y = make_batch()
        model.armed = scaled and step == bad
        x = x * torch.nan if not scaled and step == bad else x
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return [*weights, [parameter.detach().clone() for parameter in model.parameters()]]


def test_of_two_optimizers_both_or_none_make_a_healed_step(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    weights = two_optimizers(healing(watch, scopes), scaled=True)
    moved = {not torch.equal(one, other) for one, other in zip(weights[BAD_STEP], weights[BAD_STEP + 1], strict=True)}
    assert len(moved) == 1
    assert [told["applied"] for told in cures(scopes[0])] == [moved.pop()]
    assert all(value.isfinite().all() for value in weights[-1])


def test_of_two_optimizers_without_a_scaler_each_is_left_out_that_has_bad_gradients(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    weights = two_optimizers(healing(watch, scopes), scaled=False)
    assert [told["kind"] for told in cures(scopes[0])] == [CureKind.LEFT_OUT]
    assert exact_state(weights[BAD_STEP]) == exact_state(weights[BAD_STEP + 1])
    assert all(value.isfinite().all() for value in weights[-1])


def test_two_optimizers_in_a_healthy_training_are_left_alone(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = two_optimizers(healing(watch, scopes), scaled=True, bad=None)
    assert cures(scopes[0]) == []
    assert exact_state(healed) == exact_state(two_optimizers(lambda *_: None, scaled=True, bad=None))


class Interrupted(torch.optim.SGD):
    """Is left by an exception in one step."""

    at = -1

    def step(self, closure: Any = None) -> Any:
        if self.at == 0:
            raise InterruptedError
        self.at -= 1
        return super().step(closure)


def test_a_step_whose_optimizer_was_left_by_an_exception_is_not_told_as_made(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    model = made(Doubtful)
    optimizer = Interrupted(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    healing(watch, scopes)(model, scaler)
    optimizer.at = BAD_STEP
    with pytest.raises(InterruptedError):
        for step in range(BAD_STEP + 1):
            x, y = make_batch()
            model.armed = step == BAD_STEP
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [told["applied"] for told in cures(scopes[0])] == [False]


class Gains(nn.Module):
    """Multiplies by a number that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.gain)


def test_what_the_loop_sets_between_two_forwards_is_no_accident(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    model = made(Gains)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    healing(watch, scopes)(model, scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = make_batch()
            model.gain = 2.0**18 if (step, micro) == (BAD_STEP, 1) else 1.0
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert cures(scopes[0]) == []
    assert "the loop may have changed the model within the step" in notes(scopes[0])
    assert scaler.get_scale() == SCALE / 2
