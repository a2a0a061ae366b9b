"""Healthy trainings whose loop is out of the ordinary: several evaluations, several optimizers, samples one by one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.integration.healthy_runs.tasks import BATCH, CLASSES, PIXELS, WIDTH, _classify, _images


@dataclass(slots=True)
class Precision:
    """In what a training computes: the dtype under autocast, None for no autocast, and whether there is a scaler."""

    dtype: torch.dtype | None
    scaler: torch.amp.GradScaler | None = None

    @classmethod
    def drawn(cls, chance: random.Random, *, scaled: bool = True) -> Precision:
        """One by chance.

        Args:
            chance: Where it comes from.
            scaled: The loop knows how to use a scaler.
        """
        dtype = chance.choice((torch.float16, torch.bfloat16, None) if scaled else (torch.bfloat16, None))
        return cls(dtype, torch.amp.GradScaler("cpu") if dtype is torch.float16 else None)

    def autocast(self) -> Any:
        """The region that forward runs in."""
        return nullcontext() if self.dtype is None else torch.autocast("cpu", dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        """The backward of a loss, scaled where there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Each optimizer's step, and the scaler's update after all."""
        for optimizer in optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()


@dataclass(slots=True)
class Training:
    """What is watched, and what is done again and again."""

    model: nn.Module | list[nn.Module]
    step: Callable[[int], Tensor]  #: one step of the number given; returns its loss
    scaler: torch.amp.GradScaler | None = None
    kept: list[Tensor] = field(default_factory=list)  #: what else has to be finite at the end


def _perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))


def lbfgs(chance: random.Random) -> Training:
    """Many evaluations in one step, of one batch: what it learns of the curvature holds for no other."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    search = chance.choice((None, "strong_wolfe"))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)
    images, labels = _images()

    def step(_: int) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            with precision.autocast():
                loss = F.cross_entropy(model(images), labels) + 1e-3 * sum(
                    weight.square().sum() for weight in model.parameters()
                )
            loss.backward()
            return loss

        found: Tensor = optimizer.step(closure)
        return found.detach()

    return Training(model, step)


def sharpness_aware(chance: random.Random) -> Training:
    """SAM: up the gradient and back, with a gradient on either set of weights."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(_: int) -> Tensor:
        images, labels = _images()

        def gradients() -> Tensor:
            optimizer.zero_grad()
            with precision.autocast():
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            return loss.detach()

        loss = gradients()
        with torch.no_grad():
            weights: list[Tensor] = [weight for weight in model.parameters() if weight.grad is not None]
            norm = torch.stack([weight.grad.norm() for weight in weights if weight.grad is not None]).norm()
            climbed = [0.05 * weight.grad / (norm + 1e-12) for weight in weights if weight.grad is not None]
            torch._foreach_add_(weights, climbed)
        gradients()
        with torch.no_grad():
            torch._foreach_sub_(weights, climbed)
        optimizer.step()
        return loss

    return Training(model, step)


def two_players(chance: random.Random) -> Training:
    """Generator and critic with an optimizer each, one scaler for both, and noise on what is real."""
    precision = Precision.drawn(chance)
    generator = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, PIXELS), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    ours = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    theirs = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def step(_: int) -> Tensor:
        real = _images()[0]
        real = real + 0.05 * torch.randn_like(real)
        with precision.autocast():
            made = generator(torch.randn(BATCH, 8))
            told = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
        theirs.zero_grad()
        precision.backward(told)
        _step(precision, theirs)
        with precision.autocast():
            fooled = F.softplus(-critic(made)).mean()
        ours.zero_grad()
        precision.backward(fooled)
        precision.step(ours)
        return told.detach()

    return Training([generator, critic], step, precision.scaler)


def _step(precision: Precision, optimizer: torch.optim.Optimizer) -> None:
    """A step of one of several optimizers: the scaler is updated after the last."""
    optimizer.step() if precision.scaler is None else precision.scaler.step(optimizer)


def private(chance: random.Random) -> Training:
    """DP-SGD: the gradient of each sample, clipped, summed and blurred."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        with precision.autocast():
            loss = F.cross_entropy(functional_call(model, weights, (image[None],)).float(), label[None])
        return loss, loss

    each = vmap(grad(loss_of, has_aux=True), in_dims=(None, 0, 0))

    def step(_: int) -> Tensor:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        found, losses = each(weights, *_images())
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in found.values()]).norm(dim=0)
        share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, weight in model.named_parameters():
            summed = torch.einsum("b,b...->...", share, found[name])
            weight.grad = (summed + 0.1 * torch.randn_like(summed)) / BATCH
        optimizer.step()
        return losses.mean().detach()

    return Training(model, step)


def functional(chance: random.Random) -> Training:
    """A functional call on weights that are handed in, whose gradients are written to `.grad`."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_grad = chance.random() < 0.5

    def loss_of(weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        with precision.autocast():
            return F.cross_entropy(functional_call(model, weights, (images,)).float(), labels)

    def step(_: int) -> Tensor:
        images, labels = _images()
        weights: dict[str, Tensor] = dict(model.named_parameters())
        loss = loss_of(weights, images, labels)
        if by_grad:
            found = tuple(
                grad(loss_of)({name: each.detach() for name, each in weights.items()}, images, labels).values()
            )
        else:
            found = torch.autograd.grad(loss, list(weights.values()))
        for weight, one in zip(weights.values(), found, strict=True):
            weight.grad = one.detach()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


def learnt_to_learn(chance: random.Random) -> Training:
    """MAML: one step on weights of its own, and the gradient through it."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        weights: dict[str, Tensor] = dict(model.named_parameters())
        images, labels = _images()
        with precision.autocast():
            inner = F.cross_entropy(functional_call(model, weights, (images,)), labels)
        found = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: weights[name] - 0.05 * one for name, one in zip(weights, found, strict=True)}
        images, labels = _images()
        with precision.autocast():
            loss = F.cross_entropy(functional_call(model, fast, (images,)), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


def followed(chance: random.Random) -> Training:
    """An average of the weights, kept by the loop, that is evaluated in their stead."""
    precision, model = Precision.drawn(chance), nn.Sequential(_perceptron(), nn.BatchNorm1d(CLASSES))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        with precision.autocast():
            loss = _classify(model)
        precision.backward(loss)
        precision.step(optimizer)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            for kept, known in zip(average.buffers(), model.buffers(), strict=True):
                kept.copy_(known)
            if number % 6 == 5:
                average.eval()
                average(_images()[0]).argmax(-1)
        return loss.detach()

    return Training(model, step, precision.scaler, list(average.parameters()))


def penalised(chance: random.Random) -> Training:
    """A gradient penalty; where there is a scaler its gradients are brought back to their size before they are used."""
    precision, model = Precision.drawn(chance), _perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(_: int) -> Tensor:
        images, labels = _images()
        images.requires_grad_()
        optimizer.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(model(images), labels)
        scale = 1.0 if precision.scaler is None else precision.scaler.get_scale()
        (found,) = torch.autograd.grad(loss * scale, images, create_graph=True)
        found = found / scale
        loss = loss + 0.1 * found.float().square().sum(-1).mean()
        precision.backward(loss)
        precision.step(optimizer)
        return loss.detach()

    return Training(model, step, precision.scaler)
