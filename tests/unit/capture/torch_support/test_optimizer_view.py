"""What capture asks of an optimizer."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ampscope.capture.torch_support.optimizer_view import OptimizerView, around_every_step
from tests.support.paths import ROOT


def test_a_view_gives_parameters_gradients_and_rate() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [one], "lr": 0.5}, {"params": [other]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    other.grad = torch.zeros(3)
    view = OptimizerView(optimizer)
    assert [id(each) for each in view.parameters] == [id(one), id(other)]
    assert list(view.gradients) == [other.grad]
    assert view.learning_rate == 0.5
    assert not view.decides_on_device
    assert OptimizerView(torch.optim.Adam([one], fused=True)).decides_on_device


def test_steps_made_are_read_from_the_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    assert OptimizerView(optimizer).steps_made is None
    weight.grad = torch.ones(2)
    optimizer.step()
    assert OptimizerView(optimizer).steps_made == 1


def test_every_step_of_the_process_is_heard_until_the_handles_are_removed() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, heard = torch.optim.SGD([weight], lr=0.1), []
    handles = around_every_step(lambda each: heard.append(("before", each)), lambda each: heard.append(("after", each)))
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert heard == [("before", optimizer), ("after", optimizer)]


def test_nobody_else_reads_parameter_groups() -> None:
    files = [
        *(ROOT / "ampscope" / "capture").rglob("*.py"),
        *(ROOT / "ampscope" / "analysis").rglob("*.py"),
    ]
    readers = [file.name for file in files if re.search(r"\bparam_groups\b", file.read_text("utf-8"))]
    assert readers == ["optimizer_view.py"]
