import torch
from torch import nn

import ampscope


class Gain(nn.Module):
    """A factor that a normalisation behind it hides from the loss."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(100.0))

    def forward(self, h):
        return nn.functional.layer_norm(h * self.factor, (8,))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Gain(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler, every=5)

for step in range(200):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        model[1].factor.mul_(1.02)  # grows by the same share in each step
