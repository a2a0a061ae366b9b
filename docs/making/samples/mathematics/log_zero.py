import torch
from torch import nn

import ampscope


def entropy(logits):
    p = logits.softmax(-1)
    return -(p * torch.log(p)).sum(-1).mean()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    if step == 2:
        x = x * 3000
    with torch.autocast("cpu", torch.float16):
        loss = entropy(model(x))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
