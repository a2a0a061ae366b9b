"""Trains the model on every rank, alone and watched, and writes down what each training left and communicated.

torchrun --nproc-per-node 2 -m tests.integration.frameworks.sharded.training FOLDER SETTING
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import ampscope
from tests.integration.frameworks.sharded.models import CLASSES, SETTINGS, WIDTH, Setting, make_model

STEPS = 10
#: At this step one rank alone gets a batch that is too large, or (in float32) one that holds a NaN.
BAD_STEP, BAD_RANK = 7, 1
BATCH = 6
TOO_LARGE = 5000.0


@dataclass
class Trained:
    """What one training left on one rank."""

    weights: str = ""  #: digest of this rank's part
    losses: list[str] = field(default_factory=list)
    scale: float | None = None
    collectives: list[str] = field(default_factory=list)  #: in order, with the sizes of their operands


def train(setting: Setting, *, bad: bool, folder: Path | None = None, first: bool = False, **options: Any) -> Trained:
    """Trains once; watched where there is a folder, and from before the model was distributed with ``first``."""
    before = len(_begun())
    model, scaler, scope = make_model(), setting.scaler(), None
    if folder is not None and first:
        scope = ampscope.watch(model, scaler, dir=folder, quiet=True, **options)
    model = setting.distribute(model)
    if folder is not None and not first:
        scope = ampscope.watch(model, scaler, dir=folder, quiet=True, **options)
    optimizer = setting.optimizer(model.parameters(), lr=1e-3)
    trained = Trained()
    for step in range(STEPS):
        loss = _loss(model, setting, step, bad=bad)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        trained.losses.append(repr(loss.detach().item()))
    if scope is not None:
        scope.close()
    trained.collectives = _begun()[before:]
    trained.weights = _digest(model)
    trained.scale = scaler.get_scale() if scaler is not None else None
    return trained


def _loss(model: nn.Module, setting: Setting, step: int, *, bad: bool) -> Tensor:
    rank = 0 if setting.same_batch else dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = BATCH + step % 3 if setting.varies else BATCH
    x = torch.randn(size, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (size,), generator=generator)
    if bad and step == BAD_STEP and (setting.same_batch or rank == BAD_RANK):
        x = x * TOO_LARGE if setting.half else x.masked_fill(x > 1, torch.nan)
    with torch.autocast("cpu", torch.float16, enabled=setting.autocast):
        return F.cross_entropy(model(x).float(), y)


def _begun() -> list[str]:
    """Every collective that this process has begun, whoever began it, with sizes: gloo's own flight recorder."""
    recorded: Any = vars(_distributed_c10d)["_dump_fr_trace_json"]
    entries = json.loads(recorded(includeCollectives=True, onlyActive=False)).get("entries", [])
    return [f"{entry['profiling_name']} {entry['input_sizes']} {entry['output_sizes']}" for entry in entries]


def _digest(model: nn.Module) -> str:
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return hashlib.sha256(b"".join(part.detach().float().numpy().tobytes() for part in parts)).hexdigest()


def main(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    dist.init_process_group("gloo")
    setting = SETTINGS[name]
    trained = {
        "alone": train(setting, bad=False),
        "healthy": train(setting, bad=False, folder=folder / "healthy"),
        "alone, bad": train(setting, bad=True),
        "bad": train(setting, bad=True, folder=folder / "bad"),
        "bad, traced": train(setting, bad=True, folder=folder / "traced", every=1),
        "bad, watched first": train(setting, bad=True, folder=folder / "first", first=True),
    }
    result = {how: asdict(each) for how, each in trained.items()}
    (folder / f"trained-{dist.get_rank()}.json").write_text(json.dumps(result), "utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
