"""Loops that look at their loss themselves and stop at a bad one, in the places where people do so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.integration.frameworks.within_step.log_model import batch_of, log_model, loss_of
from tests.support.training.small_loop import STEPS

Watch = Callable[..., Any]


class LossIsBadError(RuntimeError):
    """What such a loop raises."""


def _stop_if_bad(loss: Tensor) -> None:
    if not bool(torch.isfinite(loss)):
        raise LossIsBadError


def before_backward(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = loss_of(model, x, y)
    _stop_if_bad(loss)
    loss.backward()
    optimizer.step()


def after_backward(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = loss_of(model, x, y)
    loss.backward()
    _stop_if_bad(loss)
    optimizer.step()


def in_clipping(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()


def in_anomaly_mode(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    with torch.autograd.set_detect_anomaly(True):
        loss_of(model, x, y).backward()
    optimizer.step()


def in_a_closure(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        loss = loss_of(model, x, y)
        _stop_if_bad(loss)
        loss.backward()
        return loss

    optimizer.step(closure)


def after_a_saliency_map(model: nn.Sequential, optimizer: Any, x: Tensor, y: Tensor) -> None:
    x.requires_grad_(True)
    loss = loss_of(model, x, y)
    torch.autograd.grad(model[0](x).mean(), x)
    before_the_backward_of(loss, optimizer)


def after_a_gradient_norm(model: nn.Sequential, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = loss_of(model, x, y)
    weight = next(model[0].parameters())
    (gradient,) = torch.autograd.grad(model[0](x).square().mean(), weight, create_graph=True)
    gradient.norm().square()  # of which the loop has use elsewhere
    before_the_backward_of(loss, optimizer)


def after_an_attack(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    x.requires_grad_(True)
    loss = loss_of(model, x, y)
    torch.autograd.grad(loss, x, retain_graph=True)
    before_the_backward_of(loss, optimizer)


def before_the_backward_of(loss: Tensor, optimizer: Any) -> None:
    _stop_if_bad(loss)
    loss.backward()
    optimizer.step()


PLACES = [
    before_backward,
    after_backward,
    in_clipping,
    in_anomaly_mode,
    in_a_closure,
    after_a_saliency_map,
    after_a_gradient_norm,
    after_an_attack,
]


def loop(watch: Watch, step_of: Callable[..., None], *, bad: bool) -> Any:
    """Ends quietly at the first bad loss: nothing holds the frames, and with them the loss, when the run closes."""
    model = log_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    watch(model)
    with contextlib.suppress(RuntimeError):
        for step in range(STEPS):
            optimizer.zero_grad()
            step_of(model, optimizer, *batch_of(step, bad=bad))
    return [model, optimizer]
