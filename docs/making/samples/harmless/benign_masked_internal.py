import torch
from torch import nn

import ampscope


class Degrees(nn.Module):
    def forward(self, h):
        scale = h.detach().abs().sum(-1, keepdim=True).float().pow(-0.5)
        return h * scale.masked_fill(scale == torch.inf, 0.0)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False), Degrees(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    if step == 0:
        x[1] = 0.0  # a node without neighbours
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
