import torch
from torch import nn

import ampscope


class Scaled(nn.Module):
    """Divides by the largest value of each row, kept from zero."""

    def forward(self, values):
        return values / (values.amax(dim=-1, keepdim=True) + 1e-8)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), Scaled(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
ampscope.watch(model, scaler)

for step in range(40):
    inputs = torch.randn(32, 16)
    if step >= 25:
        inputs[3] = 0.0  # a row without content
        with torch.no_grad():
            model[0].bias.clamp_(max=0.0)
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(inputs).squeeze(-1), inputs.mean(-1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
