"""Two ranks under DistributedDataParallel, one of which may get a batch that overflows: a program for torchrun.

    python -m tests.integration.frameworks.one_bad_rank.training FOLDER BAD_RANK

``BAD_RANK`` is -1 where no batch is bad; ``FOLDER`` gets the run, or ``-`` for an unwatched training. Rank 0 prints a
digest of the weights at the end.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ampscope

STEPS, BAD_STEP = 12, 8


class Square(nn.Module):
    """Multiplies its input by itself: what exceeds 255 leaves float16."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def main(folder: str, bad_rank: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), Square(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True) if folder != "-" else None
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        x = torch.randn(8, 16) * (3000 if step == BAD_STEP and rank == bad_rank else 1)
        y = torch.randint(0, 4, (8,))
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    if rank == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)  # noqa: T201  # the program's result
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
