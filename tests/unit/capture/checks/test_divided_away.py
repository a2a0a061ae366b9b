"""An overflow that a division turned into zeros: what cures it is tried before the weights move."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Verdict

LOUD = 600.0  #: its square is past 65504


class Norm(nn.Module):
    """A root mean square by hand: of a sum of squares that overflows, the reciprocal is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Net(nn.Module):
    """Takes the norm of what may be loud."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = Norm()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x).half()))


def told(run: Path, gain: float) -> Diagnosis:
    """The diagnosis of two steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with ampscope.watch(model, scaler, dir=run):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(4, 8) * gain).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return ampscope.diagnose(run)


def test_float32_for_the_module_is_a_cure_that_was_tried(run_folder: Path) -> None:
    primary = told(run_folder, LOUD).primary
    assert isinstance(primary, Incident)
    assert (primary.trigger, primary.module) == ("absorbed_overflow", "norm")
    first = primary.remedies[0]
    assert (first.text, first.verified) == ("Keep norm in float32.", True)


def test_a_quiet_twin_is_healthy(run_folder: Path) -> None:
    assert told(run_folder, 1.0).verdict is Verdict.HEALTHY
