"""A small classifier as users of Lightning write it, the data that one batch of breaks it, and its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
CLASSES = 4
BATCH = 8
#: So large that the squares leave float16's range, and far inside that of float32 and bfloat16.
LARGE = 3000.0

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """Squares its hidden values, as a careless activation would."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 64)
        self.norm = norm(64)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        squared = hidden * hidden
        return self.last(self.drop(self.norm(squared)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"batch": float(batch_idx)})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def batches(count: int, *, bad: Sequence[int] = (), value: float = LARGE) -> list[Batch]:
    """As many batches; the inputs of those in ``bad`` are multiplied with ``value``."""
    source = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        x, y = torch.randn(BATCH, WIDTH, generator=source), torch.randint(0, CLASSES, (BATCH,), generator=source)
        made.append((x * value if number in bad else x, y))
    return made


def scaled(scale: float = 256.0) -> list[Any]:
    """The plugin of ``precision="16-mixed"`` with a scaler that works on a CPU."""
    return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))]


def trainer(root: Any, *callbacks: Any, **options: Any) -> pl.Trainer:
    """A trainer on one CPU process that keeps to itself."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, **quiet, **options},
        default_root_dir=root,
        callbacks=list(callbacks),
    )


def loader(data: list[Batch]) -> Any:
    """The batches as they are."""
    return torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]  # a list is a data set


def weights(module: nn.Module) -> list[Tensor]:
    """Copies of all weights and buffers."""
    return [value.clone() for value in module.state_dict().values() if isinstance(value, Tensor)]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all tensors are the same, bit for bit."""
    return [each.numpy().tobytes() for each in one] == [each.numpy().tobytes() for each in other]
