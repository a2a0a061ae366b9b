"""Lines of the program around the model, as a bad step has them: where it was called, and under which autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampscope
from ampscope.analysis.cures.own_words import program_of
from ampscope.trace.schema import Change
from tests.support.primary import primary_incident


@pytest.fixture
def run(run_folder: Path) -> ampscope.Run:
    """A run whose second step fails in two models, one of them called outside of autocast."""
    models = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with ampscope.watch(models, scaler, dir=run_folder, quiet=True):
        for size in (1.0, 1e6):
            with torch.autocast("cpu", dtype=torch.float16):
                found = models[0](torch.ones(4, 4) * size)
            loss = models[1](found.float()).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return ampscope.open_run(run_folder)


def test_the_lines_that_call_the_models_are_known(run: ampscope.Run) -> None:
    program = program_of(run)
    assert program.watched_at is not None
    assert program.watched_at.code.startswith("with ampscope.watch(models")
    codes = [line.code for line in program.called_from]
    assert codes == ["found = models[0](torch.ones(4, 4) * size)", "loss = models[1](found.float()).mean()"]
    assert [line.code for line in program.under_autocast] == codes[:1]


def test_what_bfloat16_cures_is_a_change_of_the_autocast_line(run: ampscope.Run) -> None:
    remedies = primary_incident(run).remedies
    diffs = {each.kind: each.diff or "" for each in remedies if each.verified}
    assert '+            with torch.autocast("cpu", dtype=torch.bfloat16):' in diffs[Change.BF16].splitlines()


def test_a_run_without_a_bad_step_has_no_such_lines(run_folder: Path) -> None:
    model = nn.Linear(4, 4)
    with ampscope.watch(model, dir=run_folder, quiet=True):
        model(torch.ones(4, 4)).mean().backward()
    run = ampscope.open_run(run_folder)
    assert program_of(run).called_from == ()
