"""What the loop left non-finite in a tensor that it carries: the same calls in float32 tell whether that would help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampscope
from ampscope.analysis.results import Finding, Incident


class Memory:
    """Keeps a sum of squares in float16 from step to step."""

    def __init__(self) -> None:
        self.total = torch.zeros(4, dtype=torch.float16)

    def add(self, values: torch.Tensor) -> None:
        self.total = self.total + values.to(self.total.dtype).square()


def primary(run: Path, loud: float) -> Incident | Finding | None:
    """What is told of four steps, the second of which leaves something loud."""
    torch.manual_seed(0)
    model, memory = nn.Linear(4, 4), Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ampscope.watch(model, dir=run):
        for step in range(4):
            optimizer.zero_grad()
            loss = (model(torch.randn(2, 4)) * (1.0 + memory.total.float())).mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                memory.add(torch.full((4,), loud if step == 1 else 0.1))
    return ampscope.diagnose(run).primary


@pytest.mark.parametrize(("loud", "verified"), [(300.0, True), (1e30, False)], ids=["holds it", "does not"])
def test_float32_is_a_remedy_that_was_tried(loud: float, verified: bool, run_folder: Path) -> None:
    told = primary(run_folder, loud)
    assert isinstance(told, Incident)
    keep = [remedy for remedy in told.remedies if "carries from step to step" in remedy.text]
    assert [remedy.verified for remedy in keep] == [verified], told.explanation
