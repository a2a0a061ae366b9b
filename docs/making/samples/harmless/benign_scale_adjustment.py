import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
ampscope.watch(model, scaler)

for step in range(50):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    factor = 1.0 if step < 30 else 1000.0  # gradients become larger
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = factor * nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
