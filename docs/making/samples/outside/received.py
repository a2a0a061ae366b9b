# torchrun --standalone --nproc-per-node 2 received.py
import os

import torch
import torch.distributed as dist
from torch import nn

import ampscope


class Centred(nn.Module):
    """Takes off the mean over the batches of all ranks."""

    def forward(self, h):
        mean = h.detach().float().mean(0)
        dist.all_reduce(mean)
        return h - mean / dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
if dist.get_rank() == 0:  # the other rank is not watched; where it is, it is told that it began there
    scope = ampscope.watch(model, scaler, dir="ampscope_runs/received")

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    if step == 2 and dist.get_rank() == 1:
        x[1] = float("nan")
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

if dist.get_rank() == 0:
    scope.close()
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way
