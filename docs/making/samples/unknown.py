import math

import torch
from torch import nn

import ampscope


class Smoothed(nn.Module):
    def forward(self, h):
        h = h.masked_fill(h > 1.0, -math.inf)
        return h + h.mean(-1, keepdim=True)  # reads what was masked


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Smoothed(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
