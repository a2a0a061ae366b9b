"""The tracer's function mode hears what the loop calls, and nothing that AMPscope reads of the model meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.tracing.running_code import FunctionWatch
from tests.support.training.small_loop import make_scaler


class Wide(nn.Module):
    """A layer, and parameters that nothing reads."""

    def __init__(self, unread: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unread = nn.ParameterList(torch.zeros(2) for _ in range(unread))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def heard(unread: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that the mode hears of in the last of a few traced steps."""
    names: list[str] = []
    note = FunctionWatch._note

    def noted(self: FunctionWatch, func: Any, *rest: Any) -> None:
        names.append(getattr(func, "__name__", ""))
        note(self, func, *rest)

    monkeypatch.setattr(FunctionWatch, "_note", noted)
    model, scaler = Wide(unread), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ampscope.watch(model, scaler, dir=folder, every=1):
        for _ in range(4):
            optimizer.zero_grad()
            names.clear()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    monkeypatch.setattr(FunctionWatch, "_note", note)
    return names


def test_it_hears_no_more_of_a_model_with_more_parameters(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = heard(1, run_folder.with_name("few"), monkeypatch)
    assert "linear" in few
    assert heard(40, run_folder.with_name("many"), monkeypatch) == few
