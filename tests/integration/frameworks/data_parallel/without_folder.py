"""One rank of trainings that are watched without a folder: run it with torchrun.

    torchrun -m tests.integration.frameworks.data_parallel.without_folder FOLDER WAY

``WAY`` is ``after`` (the process group is there when `ampscope.watch` is called), ``before`` (it comes later), ``last``
(only the last rank is watched) or ``restarted`` (the first time, the last rank dies in mid-training).
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import ampscope

#: Steps of each training; when the last rank dies, it has made so many.
STEPS, DEATH = 5, 3


def train(way: str) -> None:
    inner = nn.Linear(4, 4)
    if way == "before":
        ampscope.watch(inner)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(inner)
    last = dist.get_rank() == dist.get_world_size() - 1
    scope = ampscope.watch(model) if way in ("after", "restarted") or (way == "last" and last) else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dies = way == "restarted" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(STEPS):
        if dies and step == DEATH:
            if scope is not None:
                scope.flush()
            dist.barrier()
            os._exit(1)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, way: str) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    train(way)


if __name__ == "__main__":
    main(*sys.argv[1:])
