import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
ampscope.watch(model, scaler)

for step in range(10):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    factor = 1e6 if step in (4, 7) else 1.0  # these steps overflow, and are skipped
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = factor * nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # although the step was skipped
