"""Loops that move weights within a step and call the model again on the moved ones, as people write them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.integration.frameworks.within_step.log_model import batch_of, log_model, loss_of
from tests.support.training.small_loop import STEPS, make_scaler

RADIUS, RATE = 0.05, 0.01
Watch = Callable[..., Any]
Moves = Callable[[list[nn.Parameter], list[Tensor]], None]

#: Ways in which weights are moved up, and back down.
MOVES: dict[str, tuple[Moves, Moves]] = {}


def _registered(name: str) -> Callable[[Callable[[list[nn.Parameter], list[Tensor], int], None]], None]:
    def register(move: Callable[[list[nn.Parameter], list[Tensor], int], None]) -> None:
        MOVES[name] = (lambda w, e: move(w, e, 1), lambda w, e: move(w, e, -1))

    return register


@_registered("in place")
def _in_place(weights: list[nn.Parameter], by: list[Tensor], sign: int) -> None:
    with torch.no_grad():
        for weight, each in zip(weights, by, strict=True):
            weight.add_(each, alpha=sign)


@_registered("with an operator")
def _operator(weights: list[nn.Parameter], by: list[Tensor], sign: int) -> None:
    with torch.no_grad():
        for weight, each in zip(weights, by, strict=True):
            operator.iadd(weight, sign * each)  # what `weight += ...` calls


@_registered("all at once")
def _foreach(weights: list[nn.Parameter], by: list[Tensor], sign: int) -> None:
    with torch.no_grad():
        torch._foreach_add_(list[Tensor](weights), by, alpha=sign)


@_registered("through data")
def _data(weights: list[nn.Parameter], by: list[Tensor], sign: int) -> None:
    for weight, each in zip(weights, by, strict=True):
        weight.data.add_(each, alpha=sign)


@_registered("row by row through data")
def _rows(weights: list[nn.Parameter], by: list[Tensor], sign: int) -> None:
    for weight, each in zip(weights, by, strict=True):
        for row in range(len(weight)):
            weight.data[row] += sign * each[row]


@_registered("other data")
def _other_data(weights: list[nn.Parameter], by: list[Tensor], sign: int) -> None:
    for weight, each in zip(weights, by, strict=True):
        weight.data = weight.data + sign * each


@_registered("from one vector")
def _vector(weights: list[nn.Parameter], by: list[Tensor], sign: int) -> None:
    moved = [weight.detach() + sign * each for weight, each in zip(weights, by, strict=True)]
    nn.utils.vector_to_parameters(torch.cat([each.reshape(-1) for each in moved]), weights)


def ascent(weights: list[nn.Parameter]) -> list[Tensor]:
    """How far SAM moves each weight, along its gradient."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return [RADIUS * gradient / norm for gradient in gradients]


def sam(move: tuple[Moves, Moves], *, second: bool = False) -> Callable[..., Any]:
    """SAM written out; the ``second`` batch of the step is the bad one, or the first."""

    def loop(watch: Watch, *, bad: bool) -> Any:
        model = log_model()
        weights = list(model.parameters())
        optimizer = torch.optim.SGD(weights, RATE)
        watch(model)
        for step in range(STEPS):
            loss_of(model, *batch_of(step, bad=bad and not second)).backward()
            by = ascent(weights)
            move[0](weights, by)
            optimizer.zero_grad()
            loss_of(model, *batch_of(step, bad=bad and second)).backward()
            move[1](weights, by)
            optimizer.step()
            optimizer.zero_grad()
        return [model, optimizer]

    return loop


def sam_with_scaler(watch: Watch, *, bad: bool) -> Any:
    """SAM under a scaler: the gradients are unscaled before the weights are moved along them."""
    model = log_model()
    weights = list(model.parameters())
    optimizer, scaler = torch.optim.SGD(weights, RATE), make_scaler()
    watch(model, scaler)
    for step in range(STEPS):
        for number in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, *batch_of(step, bad=bad and not number))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if not number:
                by = ascent(weights)
                MOVES["in place"][0](weights, by)
                optimizer.zero_grad()
                scaler.update()
        MOVES["in place"][1](weights, by)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [model, optimizer, scaler]


class Sam(torch.optim.Optimizer):
    """SAM as an optimizer around another, as it is published (davda54/sam)."""

    def __init__(self, weights: Iterator[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": RATE})
        self.base = torch.optim.SGD(self.param_groups, RATE, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight, each in zip(weights, ascent(weights), strict=True):
            self.state[weight]["before"] = weight.data.clone()
            weight.add_(each)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data = self.state[weight]["before"]
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


def sam_in_two_calls(watch: Watch, *, bad: bool) -> Any:
    model = log_model()
    optimizer = Sam(model.parameters())
    watch(model)
    for step in range(STEPS):
        x, y = batch_of(step, bad=bad)
        loss_of(model, x, y).backward()
        optimizer.first_step()
        loss_of(model, x, y).backward()
        optimizer.second_step()
    return [model, optimizer]


def sam_by_closure(watch: Watch, *, bad: bool, second: bool = False) -> Any:
    model = log_model()
    optimizer = Sam(model.parameters())
    watch(model)
    for step in range(STEPS):
        first, other = batch_of(step, bad=bad and not second), batch_of(step, bad=bad and second)

        def closure(x: Tensor = other[0], y: Tensor = other[1]) -> Tensor:
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        loss_of(model, *first).backward()
        optimizer.step(closure)
    return [model, optimizer]


def sam_by_closure_in_its_second_pass(watch: Watch, *, bad: bool) -> Any:
    return sam_by_closure(watch, bad=bad, second=True)


def extra_gradient(watch: Watch, *, bad: bool) -> Any:
    """A look ahead along the gradient, and the step from where it began with the gradient found there."""
    model = log_model()
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, RATE)
    watch(model)
    for step in range(STEPS):
        before = [weight.detach().clone() for weight in weights]
        optimizer.zero_grad()
        loss_of(model, *batch_of(step, bad=bad)).backward()
        with torch.no_grad():
            for weight in weights:
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=RATE)
        optimizer.zero_grad()
        loss_of(model, *batch_of(step, bad=False)).backward()
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        optimizer.step()
    return [model, optimizer]


LOOPS: dict[str, Callable[..., Any]] = {
    **{f"SAM, weights moved {name}": sam(move) for name, move in MOVES.items()},
    **{f"SAM, weights moved {name}, second pass": sam(move, second=True) for name, move in MOVES.items()},
    "SAM with a scaler": sam_with_scaler,
    "SAM in two calls": sam_in_two_calls,
    "SAM by closure": sam_by_closure,
    "SAM by closure, second pass": sam_by_closure_in_its_second_pass,
    "extra-gradient": extra_gradient,
}


def inner_step_by_grad(watch: Watch, *, bad: bool) -> Any:
    """MAML written out: an inner step in place with gradients that no ``backward`` brought, then the outer one."""
    model = log_model()
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, RATE)
    watch(model)
    for step in range(STEPS):
        before = [weight.detach().clone() for weight in weights]
        gradients = torch.autograd.grad(loss_of(model, *batch_of(step, bad=bad)), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=RATE)
        optimizer.zero_grad()
        loss_of(model, *batch_of(step, bad=False)).backward()
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        optimizer.step()
    return [model, optimizer]
