"""Trains a model that communicates by itself, in forward and in its loss, on every rank.

    torchrun --nproc-per-node 2 -m tests.integration.frameworks.sharded.explicit FOLDER

At one step rank 1 has a batch with a NaN, and sends what it makes of it to the others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

import ampscope

WIDTH, BATCH = 8, 4
STEPS, BAD_RANK = 5, 1
#: The last step: what follows a NaN without a scaler is NaN for good.
BAD_STEP = STEPS - 1


class Gathered(nn.Module):
    """Compares its batch with those of all ranks, as contrastive losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        own = self.inner(x)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.detach())
        return own @ torch.cat(parts).t()


def loss_of(similarity: Tensor) -> Tensor:
    """The sum over the number of pairs on all ranks, which are counted while something else is computed."""
    pairs = torch.tensor(float(similarity.numel()))
    counting = dist.all_reduce(pairs, async_op=True)
    total = F.softplus(similarity).sum()
    assert counting is not None
    counting.wait()
    assert dist.group.WORLD is not None
    largest = functional.all_reduce(similarity.detach().abs().amax(), "max", dist.group.WORLD)
    return total / pairs / largest.clamp(min=1e-3)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Gathered()
    scope = ampscope.watch(model, dir=folder, every=1, ranks="all", quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        if (step, dist.get_rank()) == (BAD_STEP, BAD_RANK):
            x[1, 2] = torch.nan
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    scope.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
