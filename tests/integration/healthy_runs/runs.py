"""Healthy trainings drawn by number: which task, precision, optimizer and habits of the loop."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ampscope
from tests.integration.healthy_runs import kept_weights, loops, more_loops, more_tasks, tasks
from tests.integration.healthy_runs.loops import Training
from tests.integration.healthy_runs.tasks import Task

TASKS: tuple[Callable[[], Task], ...] = (
    tasks.perceptron,
    tasks.convolutions,
    tasks.group_norms,
    tasks.attention,
    tasks.recomputed_attention,
    tasks.padded_encoder,
    tasks.carried_state,
    tasks.variational,
    tasks.experts,
    tasks.adapter,
    tasks.hinge,
    tasks.tabular,
    more_tasks.teacher,
    more_tasks.memory,
    more_tasks.rewards,
    more_tasks.codebook,
    more_tasks.adversaries,
    more_tasks.graph,
    more_tasks.large_values,
)
#: Those with a loop of their own: what else there is to draw, they draw themselves.
LOOPS: tuple[Callable[[random.Random], Training], ...] = (
    loops.lbfgs,
    loops.sharpness_aware,
    loops.two_players,
    loops.private,
    loops.functional,
    loops.learnt_to_learn,
    loops.followed,
    loops.penalised,
    more_loops.pure_bfloat16,
    more_loops.double,
    more_loops.spectral,
    more_loops.sparse,
    more_loops.idle_expert,
    more_loops.queue,
    more_loops.handed_on,
    more_loops.frozen_half,
    more_loops.resting,
    more_loops.recomputed,
    more_loops.values,
    more_loops.curriculum,
    more_loops.high_scale,
    more_loops.gates,
    *kept_weights.LOOPS,
)
#: The name of the dtype under autocast, and whether there is a scaler.
PRECISIONS = ("float16", "bfloat16", "bfloat16 with a disabled scaler", "float32")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.02),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": lambda weights: torch.optim.Adam(weights, lr=2e-3),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=True),
    "amsgrad": lambda weights: torch.optim.Adam(weights, lr=1e-3, amsgrad=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=5e-4),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-2),
    "adadelta": lambda weights: torch.optim.Adadelta(weights, lr=1.0),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=1e-3),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=1e-3),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=2e-3),
    "asgd": lambda weights: torch.optim.ASGD(weights, lr=1e-2),
}
#: How long each training is; by chance unless it is set.
STEPS = int(os.environ.get("HEALTHY_STEPS", "0"))
SCHEDULES = ("none", "warm-up from zero", "cosine", "one cycle")
CLIPS = ("none", "norm", "value")


@dataclass(frozen=True, slots=True)
class Setting:
    """One healthy training."""

    seed: int
    task: Callable[[], Task]
    precision: str
    optimizer: str
    schedule: str
    clip: str
    parts: int  #: micro-batches of a step
    keeps_gradients: bool  #: `zero_grad` writes zeros
    evaluates: bool  #: every few steps, without gradients
    closure: bool  #: handed to the optimizer, where there is no scaler
    every: int | None  #: traced steps, None for AMPscope's own choice
    steps: int

    def __str__(self) -> str:
        return f"{self.seed}-{self.task.__name__}-{self.precision.split()[0]}-{self.optimizer}"

    @classmethod
    def drawn(cls, seed: int) -> Setting:
        """The setting of a number: each task comes in turn, all else by chance."""
        chance = random.Random(seed)
        precision = chance.choice(PRECISIONS)
        return cls(
            seed=seed,
            task=TASKS[seed % len(TASKS)],
            precision=precision,
            optimizer=chance.choice(list(OPTIMIZERS)),
            schedule=chance.choice(SCHEDULES),
            clip=chance.choice(CLIPS),
            parts=chance.choice((1, 1, 2, 3)),
            keeps_gradients=chance.random() < 0.2,
            evaluates=chance.random() < 0.4,
            closure=precision != "float16" and chance.random() < 0.2,
            every=chance.choice((None, None, None, 1, 7)),
            steps=STEPS or chance.choice((12, 25, 60)),
        )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """A new scaler, that begins where GradScaler itself does."""
        if self.precision == "float16":
            return torch.amp.GradScaler("cpu")
        return torch.amp.GradScaler("cpu", enabled=False) if "scaler" in self.precision else None

    def autocast(self) -> torch.autocast:
        """The region that forward runs in."""
        half = self.precision != "float32"
        return torch.autocast("cpu", dtype=getattr(torch, self.precision.split()[0]) if half else None, enabled=half)


def train(setting: Setting, folder: Path) -> tuple[list[float], list[Tensor]]:
    """Trains under watch; returns the losses, and the weights and buffers at the end."""
    torch.manual_seed(setting.seed)
    loop = _Loop(setting)
    scheduler = _scheduler(setting, loop.optimizer)
    every: dict[str, Any] = {} if setting.every is None else {"every": setting.every}
    with ampscope.watch(loop.task.model, loop.scaler, dir=folder, quiet=True, **every):
        for step in range(setting.steps):
            stepped = loop.step()
            if scheduler is not None and stepped:
                scheduler.step()
            loop.task.after_step()
            if setting.evaluates and step % 5 == 4:
                loop.evaluate()
    return loop.losses, [*loop.task.model.parameters(), *loop.task.model.buffers()]


@dataclass(frozen=True, slots=True)
class OwnLoop:
    """A healthy training that writes its loop itself."""

    seed: int
    loop: Callable[[random.Random], Training]
    every: int | None
    steps: int

    def __str__(self) -> str:
        return f"{self.seed}-{self.loop.__name__}"

    @classmethod
    def drawn(cls, seed: int) -> OwnLoop:
        """The one of a number: each loop comes in turn."""
        chance = random.Random(seed)
        every, steps = chance.choice((None, None, None, 1, 7)), 12 if seed < len(LOOPS) else chance.choice((12, 30, 60))
        return cls(seed, LOOPS[seed % len(LOOPS)], every, STEPS or steps)


def train_own(setting: OwnLoop, folder: Path) -> tuple[list[float], list[Tensor]]:
    """Trains under watch; returns the losses, and the weights and buffers at the end."""
    torch.manual_seed(setting.seed)
    training = setting.loop(random.Random(setting.seed))
    every: dict[str, Any] = {} if setting.every is None else {"every": setting.every}
    with ampscope.watch(training.model, training.scaler, dir=folder, quiet=True, **every):
        losses = [training.step(number).item() for number in range(setting.steps)]
    models = training.model if isinstance(training.model, list) else [training.model]
    state = [each for model in models for each in (*model.parameters(), *model.buffers())]
    return losses, [*state, *training.kept]


class _Loop:
    """What a training consists of."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.task = setting.task()
        self.weights = [weight for weight in self.task.model.parameters() if weight.requires_grad]
        self.optimizer = OPTIMIZERS[setting.optimizer](self.weights)
        self.scaler = setting.scaler
        self.losses: list[float] = []

    def step(self) -> bool:
        """One step of the usual kind; returns whether the optimizer stepped."""
        if self.scaler is None and self.setting.closure:
            self.optimizer.step(self.gradients)  # type: ignore[arg-type]  # torch takes a tensor too
            return True
        self.gradients()
        if self.scaler is None:
            self.optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def gradients(self) -> Tensor:
        """Forward and backward of each part, and what is done to the gradients; returns the last loss."""
        self.optimizer.zero_grad(set_to_none=not self.setting.keeps_gradients)
        for _ in range(self.setting.parts):
            with self.setting.autocast():
                loss = self.task.loss(self.task.model) / self.setting.parts
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        self.losses.append(loss.item())
        if self.scaler is not None and self.setting.clip != "none":
            self.scaler.unscale_(self.optimizer)
        if self.setting.clip == "norm":
            clip_grad_norm_(self.weights, 1.0)
        elif self.setting.clip == "value":
            clip_grad_value_(self.weights, 0.5)
        return loss

    def evaluate(self) -> None:
        """A look without gradients; some metrics are NaN, and nobody minds."""
        self.task.model.eval()
        with torch.no_grad(), self.setting.autocast():
            self.task.loss(self.task.model)
            torch.zeros(0).mean()  # the accuracy of a class that no row has
        self.task.model.train()


def _scheduler(setting: Setting, optimizer: torch.optim.Optimizer) -> Any:
    if setting.schedule == "warm-up from zero":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    if setting.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    if setting.schedule == "one cycle":
        rate = optimizer.param_groups[0]["lr"]
        cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=setting.steps + 1, cycle_momentum=cycles
        )
    return None


def drawn(count: int) -> Iterable[Setting]:
    """The first settings."""
    return map(Setting.drawn, range(count))


def own_loops(count: int) -> Iterable[OwnLoop]:
    """The first of the trainings with a loop of their own."""
    return map(OwnLoop.drawn, range(count))
