"""A training that kills its own process in the middle of a step, as a job scheduler or the kernel may.

python -m tests.integration.guest.killed RUN STEP MOMENT
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn

import ampscope
from tests.support.training.small_loop import BATCH, GAIN, WIDTH, make_scaler, mse

#: A step before the death that overflows, so that the run holds an incident.
OVERFLOW = 2


class Mortal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dies = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.second(hidden)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, last: int, moment: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Mortal()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    ampscope.watch(model, scaler, dir=folder)
    for step in range(last + 1):
        model.dies = step == last and moment == "forward"
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
        if step == last and moment == "backward":
            loss.register_hook(die)
        if step == last and moment == "optimizer":
            optimizer.register_step_pre_hook(die)
        (scaler.scale(loss) * (GAIN if step == OVERFLOW else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
