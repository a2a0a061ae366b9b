"""One of two ranks that train together and communicate inside forward.

    python -m tests.integration.ranks.two_ranks RANK FOLDER WATCHERS

``WATCHERS`` are the ranks that are watched, e.g. ``0`` or ``01``; prints a digest of the weights at the end.
"""

from __future__ import annotations

import hashlib
import os
import sys

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


def main(rank: int, folder: str, watchers: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # both ranks are here, whatever network there is
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Centred())
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    scopes = []
    if str(rank) in watchers:
        import ampscope

        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(RANKS)
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
    print(hashlib.sha256(weights).hexdigest(), flush=True)  # noqa: T201  # the program's result
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
