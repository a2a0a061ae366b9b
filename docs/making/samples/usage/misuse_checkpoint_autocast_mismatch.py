import torch
from torch import nn

import ampscope


class Recomputed(torch.autograd.Function):
    """Activation checkpointing by hand, which forgets the autocast state."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)  # outside of autocast: in float32
        torch.autograd.backward(y, gradient.to(y.dtype))
        return None, x.grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(Recomputed.apply(self.block, x.requires_grad_()))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, y = torch.randn(4, 8), torch.ones(4, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
