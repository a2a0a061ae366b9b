"""Another form of the failed call, put in its place in a replay: what comes of it, and what it does to good values."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Form, ReplayRow, Table


class Logarithm(nn.Module):
    """Takes the logarithm of what a relu has made zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)).log()


def trained(run: Path, model: nn.Module) -> list[ReplayRow]:
    """One step of float16 autocast; what was tried on it."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with ampscope.watch(model, scaler, dir=run):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return list(open_run(run).rows(Table.REPLAYS))


def test_another_form_of_the_failed_call_is_tried_where_it_stands(run_folder: Path) -> None:
    form = next(row for row in trained(run_folder, Logarithm()) if row.form is not None)
    assert (form.form, form.form_call, form.outcome) == (Form.OPERAND_BOUND, "log", "finite")
    assert form.form_code == "return torch.relu(self.inner(x)).log()"
    assert str(form.form_file).endswith("test_form_trials.py")
    assert form.good_change == 0.0, "what was finite before is the same, to the last bit"
