"""Loss scales that a loop without a scaler multiplies and divides by itself, and losses that only look like that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import RIGHT, WRONG
from tests.support.training.model_parts import grad_of
from tests.support.training.small_loop import here
from tests.support.training.usage_bench import BATCH, STEPS, WIDTH, Bench, Watch, loss_of

SCALE, RATE = 8192.0, 0.01


class Bare:
    """A model that no optimizer holds."""

    def __init__(self, watch: Watch) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.parameters = list(self.model.parameters())
        watch(self.model)

    def loss(self) -> Tensor:
        return loss_of(self.model)


Update = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]


def asked(update: Update, watch: Watch, scale: Any = SCALE) -> Any:
    """Gradients of a multiplied loss, asked of ``torch.autograd.grad``."""
    bench = Bare(watch)
    for _ in range(STEPS):
        gradients = torch.autograd.grad(bench.loss() * scale, bench.parameters)
        with torch.no_grad():
            update(bench.parameters, gradients)
    return bench.model


def left(update: Update, watch: Watch) -> Any:
    """The same, left by a backward of a loss that is divided by a small number."""
    bench = Bare(watch)
    for _ in range(STEPS):
        bench.model.zero_grad()
        (bench.loss() / (1 / SCALE)).backward()
        with torch.no_grad():
            update(bench.parameters, [grad_of(weight) for weight in bench.parameters])
    return bench.model


def subtracted(step_of: Callable[[Tensor], Tensor]) -> Update:
    def update(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(step_of(gradient))

    return update


def with_alpha(alpha: float) -> Update:
    def update(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(gradient, alpha=alpha)

    return update


def averaged(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.sub_(torch.zeros_like(gradient).mul_(0.9).add_(gradient, alpha=1 / SCALE), alpha=RATE)


def all_at_once(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    unscaled = [*gradients]
    torch._foreach_div_(unscaled, SCALE)
    torch._foreach_add_([*weights], unscaled, alpha=-RATE)


def clipped(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """The factor that clips and the learning rate in one with the scale: a number that says nothing by itself."""
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm()) / SCALE
    with_alpha(RATE * min(1.0, 0.3 / norm) / SCALE)(weights, gradients)


def of_length_one(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """No scale is left in a gradient over its norm."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    subtracted(lambda gradient: RATE * (gradient / norm))(weights, gradients)


ASKED: dict[str, Update] = {
    "divided": subtracted(lambda gradient: RATE * (gradient / SCALE)),
    "as_they_move_the_weights": with_alpha(RATE / 7 / SCALE),
    "into_an_average": averaged,
    "all_at_once": all_at_once,
    "clipped": clipped,
    "of_length_one": of_length_one,
}
for _name, _update in ASKED.items():
    RIGHT[f"asked_of_a_loss_scaled_by_hand_{_name}"] = partial(asked, _update)
RIGHT["left_by_a_loss_scaled_by_hand"] = partial(left, with_alpha(RATE / SCALE))


def scaled_with(scale: Tensor, watch: Watch) -> Any:
    """A scale that is a tensor, so that it can change on the device."""
    scale = scale.clone()

    def update(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        subtracted(lambda gradient: RATE * (gradient / scale))(weights, gradients)
        scale.mul_(0.5)

    return asked(update, watch, scale)


def checked_and_left_out(watch: Watch) -> Any:
    """A dynamic scale that begins too large, and is below all that is taken for a scale in the end."""
    bench, scale = Bare(watch), 2.0**26
    for number in range(9):
        gradients = torch.autograd.grad(bench.loss() * scale, bench.parameters)
        fine = all(bool(gradient.isfinite().all()) for gradient in gradients)
        with torch.no_grad():
            for weight, gradient in zip(bench.parameters, gradients if fine else (), strict=fine):
                weight.sub_(RATE / scale * gradient)
        scale = scale / 2**4 if not fine else 16.0 if number > 5 else scale
    return bench.model


def assigned(watch: Watch) -> Any:
    """Gradients that an optimizer is given, already divided."""
    bench = Bench(lambda model, _: watch(model))
    for _ in range(STEPS):
        for weight, gradient in zip(
            bench.parameters, torch.autograd.grad(bench.loss() * SCALE, bench.parameters), strict=True
        ):
            weight.grad = gradient / SCALE
        bench.optimizer.step()
    return bench.state[:2]


RIGHT["a_scale_by_hand_that_is_a_tensor"] = partial(scaled_with, torch.tensor(4096.0))
RIGHT["a_dynamic_scale_by_hand"] = checked_and_left_out
RIGHT["gradients_unscaled_by_hand_and_assigned"] = assigned


def transformed(factor: Any, update: Update, watch: Watch) -> Any:
    """Gradients of a multiplied loss from ``torch.func.grad``, which move the model's own weights."""
    bench = Bare(watch)

    def scaled_loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        out = functional_call(bench.model, weights, (x,))
        return nn.functional.mse_loss(out.float(), torch.ones(BATCH, 1)) * factor

    for _ in range(STEPS):
        weights = dict(bench.model.named_parameters())
        detached = {name: weight.detach() for name, weight in weights.items()}
        with torch.autocast(here(), dtype=torch.float16):
            gradients = torch.func.grad(scaled_loss)(detached, torch.randn(BATCH, WIDTH))
        with torch.no_grad():
            update(list(weights.values()), list(gradients.values()))
    return bench.model


OVER = torch.tensor(SCALE)
RIGHT["a_transform_of_a_loss_scaled_by_a_tensor"] = partial(
    transformed, OVER, subtracted(lambda gradient: RATE / OVER * gradient)
)


def only_divided(watch: Watch) -> Any:
    """A mean over examples, of a loss that nothing has multiplied."""
    return asked(subtracted(lambda gradient: RATE * gradient / 128), watch, scale=1.0)


def weighted(watch: Watch) -> Any:
    """A weight of the loss is no scale: nobody divides by it."""
    return asked(subtracted(lambda gradient: 1e-3 * gradient), watch, scale=100.0)


def under_autocast_of_its_own(watch: Watch) -> Any:
    """What a transform calls computes in float16, and nothing around it says so."""
    bench = Bare(watch)

    def loss_at(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        with torch.autocast(here(), dtype=torch.float16):
            out = functional_call(bench.model, weights, (x,))
        return nn.functional.mse_loss(out.float(), torch.ones(BATCH, 1))

    for _ in range(STEPS):
        weights = dict(bench.model.named_parameters())
        detached = {name: weight.detach() for name, weight in weights.items()}
        gradients = torch.func.grad(loss_at)(detached, torch.randn(BATCH, WIDTH))
        with torch.no_grad():
            with_alpha(RATE)(list(weights.values()), list(gradients.values()))
    return bench.model


for _loop in (only_divided, weighted, under_autocast_of_its_own):
    WRONG[f"no_scaler_and_gradients_asked_{_loop.__name__}"] = _loop, Cause.MISUSE_MISSING_SCALER, 0


def a_late_scaler_and_a_weighted_loss(watch: Watch) -> Any:
    """Weights of losses that came before the first scaler was seen are none of its scales."""
    bench, heavy = Bench(lambda model, _: watch(model)), torch.tensor(100.0)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        bench.scaler.scale(1e-3 * (loss * heavy + 100 * loss + loss)).backward()
        bench.step()
    return bench.state


RIGHT["a_late_scaler_and_a_weighted_loss"] = a_late_scaler_and_a_weighted_loss
