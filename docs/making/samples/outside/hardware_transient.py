import torch
from torch import nn

import ampscope


class Faulty(nn.Module):
    """Stands for a device that returns a wrong number once, which no test can ask for."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, h):
        out = self.linear(h)
        self.calls += 1
        if self.calls == 3:
            out.detach().view(torch.int16).numpy()[0, 0] = 0x7E00  # NaN, written behind torch's back
        return out


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Faulty(), nn.Linear(8, 1))
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
