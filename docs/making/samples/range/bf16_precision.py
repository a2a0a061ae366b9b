import torch
from torch import nn

import ampscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.bfloat16)
for parameter in model.parameters():
    nn.init.constant_(parameter, 0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
ampscope.watch(model)

for step in range(6):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    loss = nn.functional.mse_loss(model(x.to(torch.bfloat16)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
