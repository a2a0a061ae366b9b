"""A job for the picture of ranks: four replicas learn digits, one gets a bad batch, and the weights of another drift.

``torchrun --standalone --nproc-per-node 4 four_ranks.py FOLDER``
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampscope

STEPS, BAD_STEP, DRIFTS_FROM = 120, 60, 80


def main(folder: str) -> None:
    """Trains one rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True, every=20, ranks="all")
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(rank)
    for step in range(STEPS):
        chosen = torch.randint(len(images), (32,))
        batch = images[chosen]
        if step == BAD_STEP and rank == 1:
            batch[3] *= 1e9
        if step == DRIFTS_FROM and rank == 2:
            with torch.no_grad():
                model.module[2].weight *= 1.2
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(batch), labels[chosen])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scope.close()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(sys.argv[1])
