"""One call in another form, in the live model: as by hand to the last bit, and only where nothing good changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.heal.module_cures import ConvertedForward
from ampscope.trace.schema import CureKind, EventKind, Table
from tests.support.training.small_loop import WIDTH
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, made, trained

pytestmark = pytest.mark.usefixtures("strict_guards")


class Inner(nn.Module):
    """Adds the logarithm of a sum that is zero while it is ``armed``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.armed = False
        self.bound: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        total = x.abs().float().sum(-1, keepdim=True)
        total = total * 0.0 if self.armed else total
        total = total if self.bound is None else total.clamp(min=self.bound)
        return x + 1e-3 * torch.log(total)


class Logarithm(nn.Module):
    """Two of them, of which the first is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = Inner(), Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.one(x)))


class Divided(nn.Module):
    """Divides by what may be zero, with an eps that float16 rounds away; one row has the size ``small``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.armed = False
        self.small = 1.0
        self.eps = 1e-8

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.armed:
            x = torch.cat([x[:1] * 0.0, x[1:2] * self.small, x[2:]])
        return self.last(x / (x.abs().amax(-1, keepdim=True) + self.eps))


def arm_for_good(model: Any, step: int) -> None:
    model.one.armed = step >= BAD_STEP


def arm_once(model: Any, step: int) -> None:
    model.one.armed = step == BAD_STEP


@pytest.fixture
def scopes() -> Iterator[list[ampscope.Scope]]:
    opened: list[ampscope.Scope] = []
    yield opened
    for scope in opened:
        scope.close()


def healing(folder: Path, scopes: list[ampscope.Scope], **options: Any) -> Callable[..., None]:
    def call(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True, heal=ampscope.Healing(**options)))

    return call


def nobody(*_: Any) -> None:
    """Nobody watches."""


def formed(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(vars(each).get("forward"), ConvertedForward)]


@pytest.mark.parametrize("scaled", [True, False])
def test_a_bounded_operand(run_folder: Path, scopes: list[ampscope.Scope], scaled: bool) -> None:
    held: list[list[str]] = []

    def before(model: Any, step: int) -> None:
        arm_for_good(model, step)
        held.append(formed(model))

    def by_hand(model: Any, step: int) -> None:
        arm_for_good(model, step)
        for each in (model.one, model.other):
            each.bound = 1e-37 if step >= BAD_STEP else None

    healed = trained(made(Logarithm), healing(run_folder, scopes), before=before, scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["modules"], told["applied"]) == (CureKind.FORM, ["one", "other"], True)
    assert "the operand of log kept at least 1e-37 at " in told["text"]
    assert held == [[]] * (BAD_STEP + 2) + [["one", "other"]] * (len(held) - BAD_STEP - 2)  # made as a step begins
    twin = trained(made(Logarithm), nobody, before=by_hand, scaled=scaled)
    for part in ("model", "optimizer"):
        assert exact_state(healed[part]) == exact_state(twin[part])
    assert healed["scaler"] == twin["scaler"]


def test_it_is_there_again_in_a_resumed_run(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    trained(made(Logarithm), healing(run_folder, scopes), before=arm_for_good)
    told = cures(scopes[0])
    held: list[list[str]] = []

    def before(model: Any, step: int) -> None:
        model.one.armed = True
        held.append(formed(model))

    healed = trained(made(Logarithm), healing(run_folder, scopes), before=before)
    assert all(torch.isfinite(torch.tensor(healed["losses"])))
    assert held[1:] == [["one", "other"]] * (len(held) - 1)
    assert cures(scopes[1]) == told


def test_it_is_lifted_where_it_is_not_needed(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    model = made(Logarithm)
    trained(model, healing(run_folder, scopes, quiet_steps=2), before=arm_once, steps=16)
    assert formed(model) == []
    assert [lifted["cure"] for lifted in cures(scopes[0], EventKind.CURE_LIFTED)] == [BAD_STEP]


def test_a_healthy_training_is_left_alone(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    healed = trained(made(Logarithm), healing(run_folder, scopes), before=nobody)
    assert cures(scopes[0]) == []
    assert exact_state(healed) == exact_state(trained(made(Logarithm), nobody, before=nobody))


@pytest.mark.parametrize(("small", "kind"), [(1.0, CureKind.FORM), (1e-4, CureKind.MODULES_FP32)])
def test_another_number_only_where_nothing_good_changes(
    run_folder: Path, scopes: list[ampscope.Scope], small: float, kind: CureKind
) -> None:
    model = made(Divided)
    model.small = small
    healed = trained(model, healing(run_folder, scopes), init_scale=2.0)
    told = cures(scopes[0])
    assert [each["kind"] for each in told] == [kind]
    assert all(torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])))
    assert told[0]["text"].startswith("0.0001 instead of 1e-08 at ") == (kind is CureKind.FORM)


def test_compiled_code_is_left_alone(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    model = made(Logarithm)
    model.compile(backend="eager")
    healed = trained(model, healing(run_folder, scopes), before=arm_once)
    assert [each["kind"] for each in cures(scopes[0])] == [CureKind.LEFT_OUT]
    assert healed["scaler"]["scale"] == SCALE
    notes = [row.text for row in ampscope.open_run(run_folder).rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert (
        "not healed: the model is compiled, and what its code calls itself cannot be changed in compiled code" in notes
    )


def test_what_is_not_allowed_is_not_done(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    trained(made(Logarithm), healing(run_folder, scopes, kinds=["modules_fp32"]), before=arm_once)
    assert cures(scopes[0]) == []
