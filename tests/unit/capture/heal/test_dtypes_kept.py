"""Code that reads what a healed module returns finds the dtype that it had; copies of a healed model are plain."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import CureKind
from tests.support.training.small_loop import WIDTH, make_batch
from tests.unit.capture.heal.told import cures, write
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, STEPS, Doubtful, made, trained

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]
HALF = torch.float16


def always(model: Any, step: int) -> None:
    model.armed = step >= BAD_STEP


class Loud(Doubtful):
    """What it returns, while it is armed, does not fit half precision itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x))) * (2.0**18 if self.armed else 1.0)


def loud(model: Any, watch: Callable[..., object], bank: Tensor, *, eval_is_loud: bool = False) -> list[torch.dtype]:
    """Trains, and writes what the model gives outside of the steps into a bank; returns the dtypes that it gave."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    watch(model, scaler)
    given = []
    for step in range(STEPS):
        x, y = make_batch()
        model.armed = step >= BAD_STEP
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=HALF):
            loss = nn.functional.mse_loss(model(x).float() / (2.0**18 if model.armed else 1.0), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.armed = eval_is_loud and model.armed
        with torch.no_grad(), torch.autocast("cpu", dtype=HALF):
            features = model(x)
            given.append(features.dtype)
            if features.dtype is HALF:
                bank.index_copy_(0, torch.arange(len(features)), features)
    return given


def healing(watch: Watch, scopes: list[ampscope.Scope]) -> Callable[..., None]:
    return lambda model, scaler: scopes.append(watch(model, scaler, heal=True))


def test_a_feature_bank_in_half_precision_is_filled_as_before(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    bank = torch.zeros(64, WIDTH, dtype=HALF)
    given = loud(made(Loud), healing(watch, scopes), bank)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"], told["outputs"]) == (CureKind.MODULES_FP32, True, {})
    assert set(given) == {HALF}


def test_what_does_not_fit_stays_in_float32(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    bank = torch.zeros(64, WIDTH, dtype=HALF)
    given = loud(made(Loud), healing(watch, scopes), bank, eval_is_loud=True)
    assert given == [HALF] * (BAD_STEP + 1) + [torch.float32] * (STEPS - BAD_STEP - 1)


class Inner(nn.Module):
    """Overflows within, and returns what fits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x * 2.0**18) * 2.0**-18 if self.armed else x


class Reads(nn.Module):
    """Notes the dtype of what its part gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(WIDTH, WIDTH)
        self.read: list[torch.dtype] = []

    @property
    def armed(self) -> bool:
        return self.inner.armed

    @armed.setter
    def armed(self, value: bool) -> None:
        self.inner.armed = value

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.read = [x.dtype]
        return self.last(x)


def test_what_fits_has_its_dtype_in_the_training_too(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    model = made(Reads)
    healed = trained(model, healing(watch, scopes), before=always)
    assert model.read == [HALF]
    (told,) = cures(scopes[0])
    assert (told["modules"], told["applied"]) == (["inner"], True)
    assert told["code"] == "ampscope.keep_fp32(model, ['inner'], outputs=torch.float16)"

    def by_hand(model: Any, step: int) -> None:
        always(model, step)
        if step == BAD_STEP:
            write(told["code"], model)

    twin = trained(made(Reads), lambda *_: None, before=by_hand)
    assert healed["losses"][BAD_STEP + 1 :] == twin["losses"][BAD_STEP + 1 :]


def test_copies_and_pickles_of_a_healed_model_are_plain(watch: Watch) -> None:
    model = made(Doubtful)
    trained(model, lambda model, scaler: watch(model, scaler, heal=True), before=always)
    kept = [module for module in model.modules() if "forward" in vars(module)]
    assert kept
    pickled = io.BytesIO()
    torch.save(model, pickled)
    assert b"held_forward" not in pickled.getvalue()
    assert b"Float32Forward" not in pickled.getvalue()
    pickled.seek(0)
    x, _ = make_batch()
    for other in (copy.deepcopy(model), torch.load(pickled, weights_only=False)):
        other.armed = False
        assert torch.equal(other(x), other.last(other.second(other.first(x))))
        assert all(part.forward.__self__ is part for part in other.modules() if "forward" in vars(part))
        with torch.autocast("cpu", dtype=HALF):
            assert other.second(x).dtype is HALF


def test_a_copy_of_a_model_that_the_user_keeps_in_float32_is_kept_too() -> None:
    model = made(Doubtful)
    ampscope.keep_fp32(model, ["second"])
    with torch.autocast("cpu", dtype=HALF):
        assert copy.deepcopy(model).second(make_batch()[0]).dtype is torch.float32
