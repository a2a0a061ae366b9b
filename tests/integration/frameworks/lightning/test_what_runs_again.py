"""What a replay runs again and what it leaves out: logging, metrics, callbacks, objects of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

import ampscope
from ampscope.integrations.lightning import WatchCallback
from tests.integration.frameworks.lightning.small_lit import (
    CLASSES,
    Batch,
    Classifier,
    alike,
    batches,
    loader,
    scaled,
    trainer,
    weights,
)

STEPS = 8
BAD = 5


class Memory:
    """State that forward computes with, and an optimizer beside it that it does not."""

    def __init__(self) -> None:
        self.mean = torch.zeros(64)
        self.calls = 0


class Busy(Classifier):
    """Logs, counts and measures in its forward and in its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.seen = torchmetrics.SumMetric()
        self.memory = Memory()
        self.loop: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        squared = hidden * hidden
        self.memory.calls += 1
        self.memory.mean.mul_(0.9).add_(squared.detach().float().clamp(max=1.0).mean(0), alpha=0.1)
        self.log("in_forward", squared.detach().float().mean())
        self.print("forward")
        return self.last(self.norm(squared) + self.memory.mean)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        self.loop["optimizer"] = self.optimizers()
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.seen.update(torch.tensor(len(y)))
        self.log("seen", self.seen)
        self.log("accuracy", self.accuracy(logits, y), prog_bar=True)
        self.log_dict({"loss": loss, "step": float(self.trainer.global_step)})
        return loss


class Keeps(pl.Callback):
    """Keeps what the trainer has logged at the end."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.metrics = {name: float(value) for name, value in trainer.logged_metrics.items()}


def fit(root: Path, *callbacks: Any) -> tuple[list[Tensor], dict[str, Any], Busy]:
    torch.manual_seed(0)
    model, keeps = Busy(), Keeps()
    fitted = trainer(root, *callbacks, keeps, plugins=scaled(), log_every_n_steps=1)
    fitted.fit(model, loader(batches(STEPS, bad=[BAD])))
    return [*weights(model), model.memory.mean], keeps.metrics, model


def test_a_replay_tells_nobody_and_counts_nothing(tmp_path: Path, capfd: Any) -> None:
    unwatched, logged, _ = fit(tmp_path)
    said = capfd.readouterr().out.count("forward")
    callback = WatchCallback(quiet=True, overhead=1.0)
    watched, logged_watched, model = fit(tmp_path, callback)
    assert alike(watched, unwatched)
    assert logged_watched == logged
    assert capfd.readouterr().out.count("forward") == said == STEPS
    assert model.memory.calls == STEPS
    assert model.accuracy.update_count == STEPS
    assert callback.scope is not None
    (incident,) = ampscope.diagnose(callback.scope.folder).incidents
    assert (incident.step, incident.cause, incident.replay) == (BAD, "fp16_overflow", "exact")


class Counts(nn.Module):
    """Counts in a metric that it is made of, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.detach().float().abs().clamp(max=10.0))
        return x / (1 + self.mean.compute())


class Normalised(Classifier):
    """Divides by what a metric has seen so far: its state takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.counts(self.first(x))
        return self.last(hidden * hidden * 50)


def test_the_state_of_a_metric_that_forward_reads_is_that_of_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callback = WatchCallback(quiet=True)
    trainer(tmp_path, callback, plugins=scaled()).fit(Normalised(), loader(batches(STEPS, bad=[BAD])))
    assert callback.scope is not None
    incidents = ampscope.diagnose(callback.scope.folder).incidents
    assert [(each.step, each.replay) for each in incidents] == [(BAD, "exact")]
