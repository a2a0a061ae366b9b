import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ampscope.watch(model)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    if step == 2:
        x = x * 1e22  # gradients whose squares leave float32
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
