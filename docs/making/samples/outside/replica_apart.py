# torchrun --standalone --nproc-per-node 2 replica_apart.py
import os

import torch
import torch.distributed as dist
from torch import nn

import ampscope

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
scope = ampscope.watch(model, scaler, dir="ampscope_runs/replica_apart", every=1, ranks="all")

for step in range(12):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    if step == 8 and rank == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 9  # on one rank alone
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

scope.close()
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way
