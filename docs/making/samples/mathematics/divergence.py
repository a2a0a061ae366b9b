import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=30.0)  # far too large
ampscope.watch(model)

for step in range(40):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
