"""A small GAN whose two optimizers the user steps, as in Lightning's guide on manual optimization."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integration.frameworks.lightning.small_lit import WIDTH, Batch


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, noise: Tensor) -> Tensor:
        hidden = self.inner(noise)
        return hidden * hidden


class Gan(pl.LightningModule):
    """Generator and discriminator take turns on every batch."""

    def __init__(self, *, toggles: bool, clips: bool, unscales: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.toggles, self.clips, self.unscales = toggles, clips, unscales

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        both: Any = self.optimizers()
        first, second = both
        self._turn(first, self._generator_loss(batch[0], first))
        self._turn(second, self._discriminator_loss(batch[0], second))

    def _generator_loss(self, noise: Tensor, optimizer: Any) -> Tensor:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        valid = torch.ones(len(noise), 1)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), valid)
        self.log("generator", loss, prog_bar=True)
        return loss

    def _discriminator_loss(self, noise: Tensor, optimizer: Any) -> Tensor:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        fake = F.binary_cross_entropy_with_logits(
            self.discriminator(self.generator(noise.sign()).detach()), torch.zeros(len(noise), 1)
        )
        real = F.binary_cross_entropy_with_logits(self.discriminator(noise.sign()), torch.ones(len(noise), 1))
        loss = (fake + real) / 2
        self.log("discriminator", loss, prog_bar=True)
        return loss

    def _turn(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.unscales:  # Lightning's step does it again, for the optimizer within this one
            plugin: Any = self.trainer.precision_plugin
            plugin.scaler.unscale_(optimizer)
        if self.clips:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        generator = torch.optim.AdamW(self.generator.parameters(), 1e-3)
        return [generator, torch.optim.AdamW(self.discriminator.parameters(), 1e-3)]
