"""A bad step is healed as its cure by hand would have had it, to the last bit; a good one is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.errors import WatchError
from ampscope.trace.schema import CureKind, Table
from tests.support.training.small_loop import WIDTH
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures, write
from tests.unit.capture.heal.trained import (
    BAD_STEP,
    SCALE,
    STEPS,
    Doubtful,
    Shifted,
    Squares,
    arm,
    made,
    poison,
    ruin,
    trained,
)

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]


def healing(watch: Watch, scopes: list[ampscope.Scope], **options: Any) -> Callable[..., None]:
    def call(model: nn.Module, scaler: Any) -> None:
        scopes.append(watch(model, scaler, heal=ampscope.Healing(**options)))

    return call


def same(one: Any, other: Any) -> bool:
    return exact_state(one) == exact_state(other)


def arm_for_good(model: Any, step: int) -> None:
    model.armed = step >= BAD_STEP


def nobody(*_: Any) -> None:
    """Nobody watches."""


@pytest.mark.parametrize("clips", [False, True])
def test_a_module_in_float32_from_the_bad_step_on(watch: Watch, clips: bool) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Doubtful), healing(watch, scopes), clips=clips)

    def by_hand(model: Any, step: int) -> None:
        arm(model, step)
        if step == BAD_STEP:
            write(told["code"], model)

    (told,) = cures(scopes[0])
    twin = trained(made(Doubtful), nobody, clips=clips, before=by_hand)
    assert (told["step"], told["kind"], told["applied"]) == (BAD_STEP, CureKind.MODULES_FP32, True)
    assert same(healed["model"], twin["model"])
    assert same(healed["optimizer"], twin["optimizer"])
    assert healed["scaler"] == twin["scaler"]
    assert healed["losses"][BAD_STEP] != healed["losses"][BAD_STEP]
    assert healed["losses"][BAD_STEP + 1 :] == twin["losses"][BAD_STEP + 1 :]


class Normed(nn.Module):
    """Divides by a norm whose squares, while it is ``armed``, half precision does not hold: zero comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), Norm(), nn.Linear(WIDTH, WIDTH)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x) * (2.0**12 if self.armed else 1.0)))


class Norm(nn.Module):
    """The root of the mean square is one after it."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


def test_an_overflow_that_a_division_hides_is_healed_from_the_next_step_on(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Normed), healing(watch, scopes), before=arm_for_good)

    def by_hand(model: Any, step: int) -> None:
        arm_for_good(model, step)
        if step == BAD_STEP + 1:
            write(told["code"], model)

    (told,) = cures(scopes[0])
    twin = trained(made(Normed), nobody, before=by_hand)
    assert (told["step"], told["kind"], told["modules"]) == (BAD_STEP, CureKind.MODULES_FP32, ["norm"])
    assert (told["applied"], told["lost"]) == (False, "")
    assert same(healed["model"], twin["model"])
    assert healed["losses"] == twin["losses"]


def test_a_conversion_in_float32(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    model = made(Squares)
    healed = trained(model, healing(watch, scopes), before=arm_for_good)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["modules"], told["applied"]) == (CureKind.CONVERSIONS, [""], True)
    assert all(torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])))
    assert healed["scaler"]["scale"] == SCALE
    assert "forward" not in vars(model)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_poisoned_buffer_holds_its_last_finite_values_again(watch: Watch, scaled: bool) -> None:
    scopes: list[ampscope.Scope] = []
    kept: list[Tensor] = []

    def before(model: Any, step: int) -> None:
        if step == BAD_STEP - 1:
            kept.append(model.mean.clone())
        poison(model, step)

    def by_hand(model: Any, step: int) -> None:
        if step == BAD_STEP:
            model.mean.copy_(kept[0])

    healed = trained(made(Shifted), healing(watch, scopes), before=before, scaled=scaled)
    twin = trained(made(Shifted), nobody, before=by_hand, scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["modules"], told["applied"]) == (CureKind.STATE, ["mean"], True)
    assert same(healed["model"], twin["model"])
    assert same(healed["optimizer"], twin["optimizer"])


@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_with_a_bad_batch_is_left_out_and_the_scale_kept(watch: Watch, scaled: bool) -> None:
    scopes: list[ampscope.Scope] = []
    states: list[Any] = []

    def before(model: Any, step: int) -> None:
        if step in (BAD_STEP, BAD_STEP + 1):
            states.append({name: value.clone() for name, value in model.state_dict().items()})

    healed = trained(made(Shifted), healing(watch, scopes), batch=ruin, before=before, scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["step"], told["kind"], told["applied"]) == (BAD_STEP, CureKind.LEFT_OUT, False)
    assert same(states[0], states[1])
    assert all(value.isfinite().all() for value in healed["model"].values())
    assert not scaled or healed["scaler"]["scale"] == SCALE
    rows = ampscope.open_run(scopes[0].folder).rows(Table.STEPS)
    assert [row.step for row in rows if row.skipped] == [BAD_STEP]


class Struck(nn.Module):
    """A layer whose result has a NaN once, which a second run does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.strike = iter([True])
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.armed and next(self.strike, False):
            x.detach()[0, 0] = torch.nan
        return self.last(x)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_that_a_second_run_does_not_show_again_is_made(watch: Watch, scaled: bool) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Struck), healing(watch, scopes), scaled=scaled)
    twin = trained(made(Struck), nobody, scaled=scaled, before=nobody)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"], told["code"]) == (CureKind.RUN_AGAIN, True, "")
    assert same(healed["model"], twin["model"])
    assert healed["scaler"] == twin["scaler"]


@pytest.mark.parametrize("options", [{}, {"init_scale": 2.0**40, "growth_interval": 4}])
@pytest.mark.parametrize("kind", [Doubtful, Squares, Shifted])
def test_a_healthy_training_and_a_scale_that_finds_its_place_are_left_alone(
    watch: Watch, kind: type[nn.Module], options: dict[str, Any]
) -> None:
    scopes: list[ampscope.Scope] = []
    steps = 40 if options else STEPS
    healed = trained(made(kind), healing(watch, scopes), before=nobody, steps=steps, **options)
    twin = trained(made(kind), nobody, before=nobody, steps=steps, **options)
    assert cures(scopes[0]) == []
    assert same(healed, twin)


def test_a_scale_that_grows_out_of_range_again_and_again_is_bounded(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    options: dict[str, Any] = {"before": nobody, "steps": 40, "init_scale": 2.0**14, "growth_interval": 1}
    healed = trained(made(Doubtful), healing(watch, scopes), **options)
    (told,) = cures(scopes[0])
    assert told["kind"] == CureKind.LOSS_SCALE
    skipped = [row.step for row in ampscope.open_run(scopes[0].folder).rows(Table.STEPS) if row.skipped]
    assert max(skipped) == told["step"] < 20
    assert f"at most {healed['scaler']['scale']:,.0f}" in told["text"]


def test_without_healing_nothing_is_changed(watch: Watch) -> None:
    healed = trained(made(Doubtful), watch)
    assert same(healed["model"], trained(made(Doubtful), nobody)["model"])


def test_gradients_from_before_the_step_are_not_replaced(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    model = made(Doubtful)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    zero_grad = torch.optim.AdamW.zero_grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "zero_grad", lambda self: zero_grad(self, set_to_none=False))
        healed = trained(model, healing(watch, scopes))
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"]) == (CureKind.MODULES_FP32, False)
    assert healed["scaler"]["scale"] == SCALE / 2


@pytest.mark.parametrize("wrong", [{"max_cures": -1}, {"kinds": ["magic"]}, {"max_slowdown": "much"}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WatchError):
        ampscope.Healing(**wrong)


def test_what_is_no_setting_is_refused(watch: Watch) -> None:
    with pytest.raises(WatchError, match="heal="):
        watch(made(Doubtful), heal="please")


@pytest.mark.parametrize("options", [{"max_cures": 0}, {"kinds": ["state", "left_out"]}])
def test_what_is_not_allowed_is_not_done(watch: Watch, options: dict[str, Any]) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Doubtful), healing(watch, scopes, **options))
    assert cures(scopes[0]) == []
    assert same(healed["model"], trained(made(Doubtful), nobody)["model"])
