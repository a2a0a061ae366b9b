"""A healed step leaves what float32 would have left: buffers that a forward replaces, and no gradient thrown away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import CureKind
from tests.support.training.small_loop import WIDTH, make_batch
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures, write
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, STEPS, Doubtful, arm, made, ruin, trained

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]


class Replaces(Doubtful):
    """Puts another tensor in the place of its running mean, instead of writing into it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        hidden = self.second(x * 2.0**18) * 2.0**-18 if self.armed else self.second(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().float().mean(0)
        return self.last(hidden) - self.mean


class Caps(Replaces):
    """The same, with a value that is finite in every dtype, and another one in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        hidden = self.second(x * 2.0**18) if self.armed else self.second(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().float().nan_to_num(0.0, 0.0, 0.0).mean(0)
        return self.last(hidden * 2.0**-18 if self.armed else hidden)


def healing(watch: Watch, scopes: list[ampscope.Scope]) -> Callable[..., None]:
    return lambda model, scaler: scopes.append(watch(model, scaler, heal=True))


def nobody(*_: Any) -> None:
    """Nobody watches."""


@pytest.mark.parametrize("kind", [Replaces, Caps])
def test_a_buffer_that_a_forward_replaces_is_what_float32_makes_it(watch: Watch, kind: type[nn.Module]) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(kind), healing(watch, scopes))
    (told,) = cures(scopes[0])
    assert told["applied"]

    def by_hand(model: Any, step: int) -> None:
        arm(model, step)
        if step == BAD_STEP:
            write(told["code"], model)

    twin = trained(made(kind), nobody, before=by_hand)
    assert exact_state(healed["model"]) == exact_state(twin["model"])


def test_a_buffer_that_a_forward_replaces_is_as_before_when_a_step_is_left_out(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    means: list[Tensor] = []
    healed = trained(
        made(Replaces), healing(watch, scopes), batch=ruin, before=lambda model, _: means.append(model.mean.clone())
    )
    assert [told["kind"] for told in cures(scopes[0])] == [CureKind.LEFT_OUT]
    assert torch.equal(means[BAD_STEP], means[BAD_STEP + 1])
    assert healed["model"]["mean"].isfinite().all()


def test_a_replaced_buffer_that_was_poisoned_holds_its_last_finite_values(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []

    def before(model: Any, step: int) -> None:
        if step == BAD_STEP:
            model.mean = model.mean * torch.nan

    healed = trained(made(Replaces), healing(watch, scopes), before=before)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["modules"], told["applied"]) == (CureKind.STATE, ["mean"], True)
    assert healed["model"]["mean"].isfinite().all()


def test_a_healthy_training_that_replaces_buffers_is_left_alone(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Replaces), healing(watch, scopes), before=nobody)
    assert cures(scopes[0]) == []
    assert exact_state(healed) == exact_state(trained(made(Replaces), nobody, before=nobody))


def abandoning(watch: Callable[..., object], by_hand: str = "", *, to_none: bool = True) -> Any:
    """Gives an iteration up between backward and step; the next one overflows. Returns the model."""
    model, given_up = made(Doubtful), BAD_STEP - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    watch(model, scaler)
    torch.manual_seed(1)
    for step in range(STEPS):
        x, y = make_batch()
        large = 2.0**18 if step == BAD_STEP else 1.0
        if by_hand and step == BAD_STEP:
            write(by_hand, model)
        optimizer.zero_grad(set_to_none=to_none)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x * large).float() / large, y)
        scaler.scale(loss).backward()
        if step != given_up:
            scaler.step(optimizer)
            scaler.update()
    return model


def test_an_iteration_that_was_given_up_is_no_part_of_a_healed_step(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = abandoning(healing(watch, scopes))
    (told,) = cures(scopes[0])
    assert told["applied"]
    twin = abandoning(nobody, told["code"])
    assert exact_state(healed.state_dict()) == exact_state(twin.state_dict())


def test_gradients_that_were_set_to_zero_between_two_backward_passes_are_not_replaced(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = abandoning(healing(watch, scopes), to_none=False)
    assert [told["applied"] for told in cures(scopes[0])] == [False]
    assert all(value.isfinite().all() for value in healed.state_dict().values())
