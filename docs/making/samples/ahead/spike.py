import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ampscope.watch(model)

for step in range(110):
    x = torch.rand(32, 8)
    y = torch.sin(3 * x).sum(1, keepdim=True) / 4
    if step == 60:
        x[5] *= 255  # one image in bytes, not between 0 and 1
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
