"""A loop changes its working directory, as Hydra does: the run stays whole, where it began."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ampscope
from ampscope.trace.schema import Table
from tests.support.training.training_loop import TrainingLoop


def test_a_run_stays_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    loop = TrainingLoop()
    with ampscope.watch(loop.model, loop.scaler, dir="run") as scope:
        os.chdir(elsewhere)
        loop.step()
        with loop.model.get_submodule("second").register_forward_hook(lambda *args: args[2] * float("inf")):
            loop.step()
    said = capfd.readouterr().err
    assert "recording to ./run\n" in said
    assert "ampscope diagnose ./run\n" in said
    assert not list(elsewhere.iterdir())
    assert scope.folder == tmp_path / "run"
    with ampscope.open_run(scope.folder) as run:
        assert len(run.rows(Table.STEPS)) == 2
        assert len(run.rows(Table.INCIDENTS)) == 1
