"""Runs with more than a model and a loss: teachers, memories, adversaries, rewards."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integration.healthy_runs.tasks import BATCH, CLASSES, INFINITY, PIXELS, WIDTH, Task, _digits, _images


def _encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def teacher() -> Task:
    """A student that follows the moving average of itself."""
    student = _encoder()
    target = copy.deepcopy(student).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        images, _ = _images()
        with torch.no_grad():
            wanted = F.normalize(target(images + 0.1 * torch.randn_like(images)).float(), dim=-1)
        return (F.normalize(model(images).float(), dim=-1) - wanted).square().sum(-1).mean() + 0.01 * model(
            images
        ).std()

    def follow() -> None:
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), student.parameters(), strict=True):
                ours.lerp_(theirs, 0.05)

    return Task(student, loss, follow)


def memory() -> Task:
    """Features of past batches in a bank that begins empty: what is not there yet is masked with -inf."""
    bank, filled, place = torch.zeros(4 * BATCH, WIDTH), torch.zeros(4 * BATCH, dtype=torch.bool), [0]

    def loss(model: nn.Module) -> Tensor:
        images, _ = _images()
        ours = F.normalize(model(images).float(), dim=-1)
        near = F.normalize(model(images + 0.05 * torch.randn_like(images)).float(), dim=-1)
        others = (ours @ bank.clone().T).masked_fill(~filled, -INFINITY)
        logits = torch.cat([(ours * near).sum(-1, keepdim=True), others], -1) / 0.2
        rows = slice(place[0], place[0] + BATCH)
        bank[rows], filled[rows] = ours.detach(), True
        place[0] = (place[0] + BATCH) % len(bank)
        return F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))

    return Task(_encoder(), loss)


def rewards() -> Task:
    """A policy gradient: noisy from step to step, with returns that a running mean and deviation normalise."""
    policy = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    seen, mean, square = torch.zeros(()), torch.zeros(()), torch.zeros(())

    def loss(model: nn.Module) -> Tensor:
        images, labels = _images()
        chance = torch.distributions.Categorical(logits=model(images).float())
        action = chance.sample()
        returns = (action == labels).float() * 10 + torch.randn(BATCH)
        seen.add_(BATCH)
        mean.add_((returns - mean).sum() / seen)
        square.add_((returns.square() - square).sum() / seen)
        gain = (returns - mean) / (square - mean**2).clamp(min=0).sqrt().add(1e-3)
        return -(chance.log_prob(action) * gain).mean() - 0.01 * chance.entropy().mean()

    return Task(policy, loss)


class _Codebook(nn.Module):
    """Vector quantisation with a straight-through gradient and a codebook that follows its rows by moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(PIXELS, 8), nn.Linear(8, PIXELS)
        self.register_buffer("codes", torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.get_buffer("codes")
        found = self.encode(x).float()
        nearest = torch.cdist(found, codes).argmin(-1)
        with torch.no_grad():
            for code in nearest.unique():
                codes[code].lerp_(found[nearest == code].mean(0), 0.05)
        chosen = codes[nearest]
        through = found + (chosen - found).detach()
        return F.mse_loss(self.decode(through).float(), x) + 0.25 * F.mse_loss(found, chosen)


def codebook() -> Task:
    return Task(_Codebook(), lambda model: model(_images()[0]))


class _Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, PIXELS), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, real: Tensor) -> Tensor:
        made = self.generator(torch.randn(len(real), 8))
        told = self.critic(torch.cat([real, made.detach()])).float()
        frozen = [weight.detach() for weight in self.critic.parameters()]
        fooled = F.linear(F.leaky_relu(F.linear(made, frozen[0], frozen[1]), 0.2), frozen[2], frozen[3]).float()
        return F.softplus(-told[: len(real)]).mean() + F.softplus(told[len(real) :]).mean() + F.softplus(-fooled).mean()


def adversaries() -> Task:
    """Generator and critic, whose losses rise and fall."""
    return Task(_Adversaries(), lambda model: model(_images()[0]))


class _Graph(nn.Module):
    """Messages over edges, summed at their ends; a node may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.randint(len(x), (2, 3 * len(x)))
        sent = F.relu(self.message(x))[ends[0]].float()
        received = torch.zeros(len(x), WIDTH).index_add(0, ends[1], sent)
        count = torch.bincount(ends[1], minlength=len(x)).clamp(min=1)
        out: Tensor = self.head(received / count[:, None])
        return out


def graph() -> Task:
    def loss(model: nn.Module) -> Tensor:
        images, labels = _images()
        return F.cross_entropy(model(images), labels)

    return Task(_Graph(), loss)


def large_values() -> Task:
    """Inputs in the thousands, which float16 holds, and a norm that brings them down."""
    model = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def loss(model: nn.Module) -> Tensor:
        images, labels = _digits()
        chosen = torch.randint(len(labels), (BATCH,))
        return F.cross_entropy(model(1000 * images[chosen]), labels[chosen])

    return Task(model, loss)
