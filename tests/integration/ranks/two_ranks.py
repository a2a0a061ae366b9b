"""One of two ranks that train together and communicate inside forward.

    python -m tests.integration.ranks.two_ranks FOLDER WATCHERS

``WATCHERS`` are the ranks that are watched, e.g. ``0`` or ``01``; each leaves a digest of its weights in
``FOLDER/weights-RANK``.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, poison

RANKS = 2


class Centred(nn.Module):
    """Subtracts the mean over all ranks, as synchronised normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        mean = hidden.detach().float().mean(0)
        dist.all_reduce(mean)
        return hidden - mean / RANKS


def main(folder: str, watchers: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Centred())
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    scopes = []
    if str(rank) in watchers:
        import ampscope

        scopes.append(ampscope.watch(model, scaler, dir=f"{folder}/run", quiet=True))
    torch.manual_seed(1 + rank)
    for step in range(POISONED + 2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, WIDTH))
        poison(step, scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
    for scope in scopes:
        scope.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(folder, f"weights-{rank}").write_text(hashlib.sha256(weights).hexdigest(), "utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(*sys.argv[1:])
