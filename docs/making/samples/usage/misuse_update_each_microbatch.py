import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(8):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x), y) / 2
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # for each micro-batch
    if step % 2:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # for each micro-batch, too
