import torch
from torch import nn

import ampscope


class Squares(nn.Module):
    def forward(self, h):
        return h * h


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False), Squares(), nn.Linear(8, 1))
nn.init.eye_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler, every=1)

for step in range(12):
    x, y = torch.rand(4, 8) * 20 + 200, torch.ones(4, 1)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
