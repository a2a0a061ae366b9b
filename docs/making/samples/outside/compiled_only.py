import torch
from torch import nn

import ampscope


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(x.relu())


calls = 0


def faulty(graph, examples):
    """Stands for a compiler whose code computes otherwise than eager code."""

    def run(*arguments):
        global calls
        calls += 1
        return [out * (float("nan") if calls == 3 else 1.0) for out in graph(*arguments)]

    return run


torch.manual_seed(0)
model = Net()
model.compile(backend=faulty)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
