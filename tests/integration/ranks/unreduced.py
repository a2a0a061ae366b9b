"""Two ranks whose model has other parameters than ``DistributedDataParallel`` was built with.

``unreduced.py FOLDER by_nobody|by_the_loop|by_the_wrapper``: who reduces the gradients.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ampscope

STEPS = 8


def main(folder: str, reduced: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    if reduced != "by_the_wrapper":
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = ampscope.watch(model, dir=folder, quiet=True, ranks="all")
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(torch.randn(8, 4)).float(), torch.ones(8, 2))
        loss.backward()
        if reduced == "by_the_loop":
            for each in model.parameters():
                dist.all_reduce(each.grad)
        optimizer.step()
    scope.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way


if __name__ == "__main__":
    main(*sys.argv[1:])
