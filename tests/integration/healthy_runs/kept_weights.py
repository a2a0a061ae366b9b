"""Healthy trainings without an optimizer: the loop moves weights by hand, or keeps them by itself."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from tests.integration.healthy_runs.loops import Precision, Training, _perceptron
from tests.integration.healthy_runs.tasks import _images


def by_hand(chance: random.Random) -> Training:
    """Momentum that the loop writes itself, after a backward or from ``torch.autograd.grad``."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    weights = list(model.parameters())
    velocity = [torch.zeros_like(weight) for weight in weights]
    asks, through_data = chance.random() < 0.5, chance.random() < 0.5

    def step(_: int) -> Tensor:
        images, labels = _images()
        with precision.autocast():
            loss = F.cross_entropy(model(images).float(), labels)
        if asks:
            slopes = torch.autograd.grad(loss, weights)
        else:
            model.zero_grad()
            loss.backward()
            slopes = tuple(slope for weight in weights if (slope := weight.grad) is not None)
        with torch.no_grad():
            for weight, slope, kept in zip(weights, slopes, velocity, strict=True):
                kept.mul_(0.8).add_(slope)
                (weight.data if through_data else weight).sub_(0.02 * kept)
        return loss.detach()

    return Training(model, step, kept=velocity)


def kept(chance: random.Random) -> Training:
    """A dictionary of weights that torch.func differentiates by, evaluated now and then with a moving average of it."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    average = dict(weights)
    parts, evaluates = chance.choice((1, 2)), chance.random() < 0.5

    def loss_of(now: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        with precision.autocast():
            return F.cross_entropy(functional_call(model, now, (images,)).float(), labels)

    def step(number: int) -> Tensor:
        nonlocal weights, average
        losses, summed = [], {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for _ in range(parts):
            slopes, loss = torch.func.grad_and_value(loss_of)(weights, *_images())
            summed = {name: each + slopes[name] / parts for name, each in summed.items()}
            losses.append(loss)
        weights = {name: weight - 0.05 * summed[name] for name, weight in weights.items()}
        average = {name: torch.lerp(each, weights[name], 0.1) for name, each in average.items()}
        if evaluates and number % 3 == 2:
            with torch.no_grad():
                loss_of(average, *_images())
        return torch.stack(losses).mean()

    return Training(model, step)


def per_sample(chance: random.Random) -> Training:
    """Private gradients of weights that the model never holds."""
    precision, model = Precision.drawn(chance, scaled=False), _perceptron()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def loss_of(now: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        with precision.autocast():
            return F.cross_entropy(functional_call(model, now, (image[None],)).float(), label[None])

    def step(_: int) -> Tensor:
        nonlocal weights
        images, labels = _images()
        slopes, losses = torch.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0, 0))(weights, images, labels)
        norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
        clip = (1.0 / norms.clamp(min=1e-6)).clamp(max=1.0)
        mean = {name: torch.einsum("b,b...->...", clip, slope) / len(images) for name, slope in slopes.items()}
        weights = {name: weight - 0.1 * mean[name] for name, weight in weights.items()}
        return losses.mean()

    return Training(model, step)


LOOPS = (by_hand, kept, per_sample)
