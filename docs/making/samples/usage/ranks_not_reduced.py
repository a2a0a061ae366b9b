# torchrun --standalone --nproc-per-node 2 ranks_not_reduced.py
import os

import torch
import torch.distributed as dist
from torch import nn

import ampscope

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
saved = {name: each.clone() for name, each in model.state_dict().items()}
model.load_state_dict(saved, assign=True)  # other parameters than the wrapper knows
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scope = ampscope.watch(model, dir="ampscope_runs/ranks_not_reduced", ranks="all")

torch.manual_seed(dist.get_rank())
for step in range(12):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

scope.close()
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that leaves in the ordinary way
