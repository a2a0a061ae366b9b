import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
scaler = torch.amp.GradScaler("cpu")
ampscope.watch(model, scaler)

for step in range(28):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    with torch.autocast("cpu", torch.float16):
        loss = 1e8 * nn.functional.mse_loss(model(x).float(), y)  # a loss in the wrong unit
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
