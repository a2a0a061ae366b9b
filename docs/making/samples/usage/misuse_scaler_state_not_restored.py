import copy

import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
ampscope.watch(model, scaler)
checkpoint = {}

for step in range(12):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    if step == 8:  # a checkpoint is loaded: the model and the optimizer, not the scaler
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x), y)

    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
