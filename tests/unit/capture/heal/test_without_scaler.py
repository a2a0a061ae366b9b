"""Loops without scaler and clipping are healed like others; nothing else keeps a bad step from the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.trace.schema import CureKind
from tests.support.training.small_loop import make_batch
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures, write
from tests.unit.capture.heal.trained import BAD_STEP, STEPS, Doubtful, Shifted, Squares, arm, made, poison, ruin, spoil

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]


def trained(
    model: Any, dtype: torch.dtype, watch: Callable[[nn.Module], object], *, before: Any = arm, batch: Any = None
) -> dict[str, Any]:
    """The shortest loop there is; returns the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    watch(model)
    torch.manual_seed(1)
    for step in range(STEPS):
        x, y = make_batch()
        x, y = batch(step, (x, y)) if batch is not None else (x, y)
        before(model, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
    state: dict[str, Any] = model.state_dict()
    return state


def nobody(*_: Any) -> None:
    """Nobody watches."""


def healing(watch: Watch, scopes: list[ampscope.Scope]) -> Callable[[nn.Module], None]:
    return lambda model: scopes.append(watch(model, heal=True))


def finite(state: dict[str, Any]) -> bool:
    return all(bool(value.isfinite().all()) for value in state.values())


def test_a_module_in_float32(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Doubtful), torch.float16, healing(watch, scopes))
    (told,) = cures(scopes[0])
    assert (told["step"], told["kind"], told["applied"]) == (BAD_STEP, CureKind.MODULES_FP32, True)

    def by_hand(model: Any, step: int) -> None:
        arm(model, step)
        if step == BAD_STEP:
            write(told["code"], model)

    assert exact_state(healed) == exact_state(trained(made(Doubtful), torch.float16, nobody, before=by_hand))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_conversion(watch: Watch, dtype: torch.dtype) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Squares), dtype, healing(watch, scopes))
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"]) == (CureKind.CONVERSIONS, True)
    assert finite(healed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_poisoned_buffer(watch: Watch, dtype: torch.dtype) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Shifted), dtype, healing(watch, scopes), before=poison)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"]) == (CureKind.STATE, True)
    assert finite(healed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "kind"), [(spoil, CureKind.ROWS_LEFT_OUT), (ruin, CureKind.LEFT_OUT)])
def test_a_bad_batch(watch: Watch, dtype: torch.dtype, batch: Callable[..., Any], kind: CureKind) -> None:
    scopes: list[ampscope.Scope] = []
    healed = trained(made(Shifted), dtype, healing(watch, scopes), before=nobody, batch=batch)
    assert [told["kind"] for told in cures(scopes[0])] == [kind]
    assert finite(healed)
