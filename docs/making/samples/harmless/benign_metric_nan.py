import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
        accuracy = (out[y > 5] - 1).mean().detach()  # the mean over nothing, for a log
        loss = nn.functional.smooth_l1_loss(out, y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
