"""Loops with two optimizers and no scaler: each step with bad gradients is healed or left out, and that is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import CureKind
from tests.support.training.small_loop import WIDTH
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, STEPS, Doubtful

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]
Weights = list[list[Tensor]]


class Pair(nn.ModuleDict):
    """A generator, and a discriminator of what it makes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__({"generator": Doubtful(), "discriminator": Doubtful()})


def rival(model: nn.Module, dtype: torch.dtype, samples: Tensor, *, is_real: bool) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return nn.functional.softplus((-1 if is_real else 1) * model(samples).float()).mean()


def adversarial(
    watch: Callable[[list[nn.Module]], object],
    spoil: Callable[[Pair, int, str], object],
    *,
    shares_forward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Weights:
    """Trains a pair in turns; returns the weights before each step and after the last.

    Args:
        watch: Watches the models.
        spoil: Called before the turn of each, with its name.
        shares_forward: Both losses are there before the first backward.
        dtype: Of the autocast regions.
    """
    pair = Pair()
    generator, discriminator = pair.values()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (discriminator, generator)]
    watch([generator, discriminator])
    torch.manual_seed(1)
    weights = []
    for step in range(STEPS):
        weights.append([each.detach().clone() for each in pair.parameters()])
        real, noise = torch.randn(2, 8, WIDTH)
        optimizers[0].zero_grad()
        spoil(pair, step, "discriminator")
        with torch.autocast("cpu", dtype=dtype):
            made = generator(noise)
        of_real = rival(discriminator, dtype, real, is_real=True)
        losses = [of_real + rival(discriminator, dtype, made.detach(), is_real=False)]
        if shares_forward:
            spoil(pair, step, "generator")
            losses.append(rival(generator, dtype, made * torch.nan if step == BAD_STEP else made, is_real=True))
        losses[0].backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        spoil(pair, step, "generator")
        (losses[1] if shares_forward else rival(discriminator, dtype, made, is_real=True)).backward()
        optimizers[1].step()
    return [*weights, [each.detach().clone() for each in pair.parameters()]]


def nobody(*_: Any) -> None:
    """Nobody watches."""


def healing(watch: Watch, scopes: list[ampscope.Scope]) -> Callable[[list[nn.Module]], None]:
    return lambda models: scopes.append(watch(models, heal=True))


def arms(*names: str) -> Callable[[Pair, int, str], None]:
    """The discriminator fails in the turns with these names."""

    def spoil(pair: Pair, step: int, name: str) -> None:
        discriminator: Any = pair["discriminator"]
        discriminator.armed = step == BAD_STEP and name in names

    return spoil


def finite(weights: Weights) -> bool:
    return all(bool(each.isfinite().all()) for each in weights[-1])


@pytest.mark.parametrize("turn", ["discriminator", "generator"])
def test_each_turn_of_two_is_healed(watch: Watch, turn: str) -> None:
    scopes: list[ampscope.Scope] = []
    healed = adversarial(healing(watch, scopes), arms(turn), dtype=torch.float16)
    (told,) = cures(scopes[0])
    assert (told["step"], told["kind"], told["applied"]) == (BAD_STEP, CureKind.MODULES_FP32, True)
    assert finite(healed)


def test_an_optimizer_whose_gradients_cannot_be_replaced_is_left_out(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = adversarial(healing(watch, scopes), nobody, shares_forward=True)
    (told,) = cures(scopes[0])
    assert (told["step"], told["kind"], told["optimizer"]) == (BAD_STEP, CureKind.LEFT_OUT, 1)
    assert finite(healed)
    moved = [not torch.equal(*pair) for pair in zip(healed[BAD_STEP], healed[BAD_STEP + 1], strict=True)]
    assert moved == [False] * (len(moved) // 2) + [True] * (len(moved) // 2)  # the generator's come first


def test_a_healthy_pair_is_left_alone(watch: Watch) -> None:
    scopes: list[ampscope.Scope] = []
    healed = adversarial(healing(watch, scopes), nobody)
    assert cures(scopes[0]) == []
    assert exact_state(healed) == exact_state(adversarial(nobody, nobody))
