import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in (model[0], model[2])]
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
ampscope.watch(model, scaler)

for step in range(8):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    factor = 1e6 if step == 4 else 1.0  # this step overflows
    with torch.autocast("cpu", torch.float16):
        loss = factor * nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()  # between the optimizers: the second unscales by another factor
        optimizer.zero_grad()
