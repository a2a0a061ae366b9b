"""A training that goes on until it is killed, and takes orders.

Start it with ``python -m tests.integration.browser.live.training RUN ORDERS``.

A file ``ORDERS/spoil`` makes the next batch hold a logarithm of zero; ``ORDERS/end`` ends the training in order.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ampscope

WIDTH, BATCH, PAUSE_S = 8, 4, 0.1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.floor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.second(torch.relu(self.first(x))).float().square() * self.floor + self.floor)


def main(folder: str, orders: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ampscope.watch(model, scaler, dir=folder, every=50):
        while not (orders / "end").exists():
            spoil = orders / "spoil"
            model.floor = 0.0 if spoil.exists() else 1.0
            spoil.unlink(missing_ok=True)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(BATCH, WIDTH)).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
