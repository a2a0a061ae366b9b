"""One rank of trainings with Lightning's ``ddp`` strategy, watched and not: run it with torchrun.

    torchrun -m tests.integration.frameworks.lightning.ranks FOLDER SETTING...

The last rank gets a batch that breaks the step `BAD`. Rank K leaves ``FOLDER/SETTING-K.json``: whether the watched
training was the unwatched one bit for bit, what was logged, and the folder of its run.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from ampscope.integrations.lightning import WatchCallback
from tests.integration.frameworks.lightning.gan import Gan
from tests.integration.frameworks.lightning.small_lit import (
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

#: What of a trainer, and which model.
SETTINGS: dict[str, dict[str, Any]] = {
    "16-mixed": {"plugins": scaled},
    "accumulated": {"plugins": scaled, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    "manual": {"precision": "bf16-mixed", "strategy": "ddp_find_unused_parameters_true", "model": Gan},
    "logged": {"plugins": scaled, "logged": True},
}


def train(
    folder: Path, rank: int, bad: int, *callbacks: Any, **options: Any
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """One training; the weights and what was logged at the end."""
    torch.manual_seed(0)
    manual = options.pop("model", None) is not None
    model = Gan(toggles=True, clips=True) if manual else Classifier()
    plugins = options.pop("plugins", None)
    if plugins is not None:
        options["plugins"] = plugins()
    if options.pop("logged", False):
        options |= {"logger": CSVLogger(folder / "logs"), "enable_checkpointing": True}
        callbacks = (*callbacks, ModelCheckpoint())
    value = float("nan") if manual else 3000.0
    data = batches(STEPS * options.get("accumulate_grad_batches", 1), bad=[bad] if rank == 1 else [], value=value)
    options = {"strategy": "ddp", "use_distributed_sampler": False, **options, "devices": 2}
    fitted = trainer(folder, *callbacks, **options)
    torch.manual_seed(1 + rank)
    fitted.fit(model, loader(data))
    return weights(model), {name: float(value) for name, value in fitted.logged_metrics.items()}


def main(folder: Path, *names: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in names:
        setting = SETTINGS[name]
        bad = BAD * setting.get("accumulate_grad_batches", 1)
        unwatched, logged = train(folder / f"{name}-unwatched", rank, bad, **setting)
        callback = WatchCallback()
        watched, logged_too = train(folder / name, rank, bad, callback, **setting)
        assert callback.scope is not None
        told = {
            "alike": alike(watched, unwatched),
            "logged": json.dumps(logged) == json.dumps(logged_too),
            "folder": str(callback.scope.folder),
        }
        (folder / f"{name}-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
