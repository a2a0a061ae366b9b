"""The verdict in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampscope.integrations._framework_run import verdict_line
from tests.support.training.training_loop import TrainingLoop


def test_a_healthy_run_says_so(watch: Any) -> None:
    loop = TrainingLoop()
    scope = watch(loop.model, loop.scaler)
    loop.step(3)
    scope.close()
    line = verdict_line(scope.folder)
    assert line.startswith("healthy: ")
    assert line.endswith(f"ampscope diagnose {scope.folder}")
    assert "\n" not in line


def test_a_run_that_cannot_be_read_ends_no_training(tmp_path: Path) -> None:
    assert "the run has no verdict" in verdict_line(tmp_path / "gone")
