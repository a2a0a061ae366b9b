"""Ranks under DistributedDataParallel, one of which may go wrong: a program for torchrun.

    python -m tests.integration.frameworks.one_bad_rank.training FOLDER BAD_RANK [HOW]

``BAD_RANK`` is -1 where none goes wrong; ``FOLDER`` gets the run, or ``-`` for an unwatched training. ``HOW`` is
``overflow`` (float16 with a scaler, a batch is too large), ``nan`` (bfloat16 and no scaler, a batch is not finite) or
``drift`` (a weight is changed, and all ranks are traced). Rank 0 prints a digest of the weights at the end.
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


def main(folder: str, bad_rank: int, how: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), Square(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how != "nan")
    dtype = torch.bfloat16 if how == "nan" else torch.float16
    every, ranks = (1, "all") if how == "drift" else (None, 1)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True, every=every, ranks=ranks) if folder != "-" else None
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        bad = step == BAD_STEP and rank == bad_rank
        x = torch.randn(8, 16) * (3000 if bad and how == "overflow" else 1)
        if bad and how == "nan":
            x[3, 5] = float("nan")
        if bad and how == "drift":
            with torch.no_grad():
                model.module[0].weight[0, 0] += 9
        y = torch.randint(0, 4, (8,))
        with torch.autocast("cpu", dtype):
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
    main(sys.argv[1], int(sys.argv[2]), *(sys.argv[3:] or ["overflow"]))
