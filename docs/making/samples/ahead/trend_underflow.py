import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
model[2].requires_grad_(False)
optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
ampscope.watch(model, scaler, every=5)

for step in range(200):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        model[2].weight.mul_(0.95)  # and with it all gradients below
