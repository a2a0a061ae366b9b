import torch
from torch import nn

import ampscope


class Positions(nn.Module):
    def forward(self, h):
        position = torch.arange(2048).to(h.dtype)  # bfloat16 counts in steps of 8 up there
        return h + torch.sin(position.unsqueeze(-1) * h.mean()).mean()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False), Positions(), nn.Linear(8, 1))
nn.init.eye_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ampscope.watch(model)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
