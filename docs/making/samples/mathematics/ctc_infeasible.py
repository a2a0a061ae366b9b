import torch
from torch import nn

import ampscope


def ctc(out, length):
    frames = nn.functional.log_softmax(out.float().reshape(8, 1, 4), -1)
    target = torch.ones(1, length, dtype=torch.long)
    return nn.functional.ctc_loss(frames, target, torch.tensor([8]), torch.tensor([length]))


torch.manual_seed(0)
model = nn.Linear(8, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
ampscope.watch(model, scaler)

for step in range(5):
    x, length = torch.randn(1, 8), 4
    if step == 2:
        length = 9  # a transcript longer than its recording
    with torch.autocast("cpu", torch.float16):
        loss = ctc(model(x), length)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
