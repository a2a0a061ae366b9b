import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    optimizer.zero_grad()
    output = model(x)  # before the region begins
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(output, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
