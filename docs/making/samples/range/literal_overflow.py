import torch
from torch import nn

import ampscope


class Masked(nn.Module):
    def forward(self, h):
        return (h + (1.0 - (h.abs() > 0).to(h.dtype)) * -1e9).softmax(-1)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False), Masked(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    if step == 2:
        x[1] = 0.0  # a row of padding
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
