"""The columns of an optimizer's steps, by step, whatever their order in the files."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampscope
from ampscope.analysis.tables.step_history import in_order, steps_of
from tests.support.trace_builder import TraceBuilder

COLUMNS = ("step", "loss", "skipped")


@pytest.mark.parametrize("steps", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=["in order", "not in order"])
def test_steps_of_all_segments_come_in_order(steps: list[int], run_folder: Path) -> None:
    for half in (steps[:2], steps[2:]):
        trace = TraceBuilder(run_folder)
        for step in half:
            trace.step(step=step, loss=None if step == 1 else float(step), skipped=step == 2)
            trace.step(step=step, optimizer=1)
        trace.close()
    with ampscope.open_run(run_folder) as run:
        found = in_order(steps_of(run, 0, 0).select(*COLUMNS))
    assert found.ints("step").tolist() == [0, 1, 2, 3]
    assert found.known("loss").tolist() == [True, False, True, True]
    assert found.floats("loss")[[0, 2, 3]].tolist() == [0.0, 2.0, 3.0]
    assert found.flags("skipped").tolist() == [False, False, True, False]


def test_an_optimizer_without_steps_has_empty_columns(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    with ampscope.open_run(trace.close()) as run:
        found = in_order(steps_of(run, 0, 5).select(*COLUMNS))
    assert len(found) == 0
    assert found.ints("step").tolist() == found.floats("loss").tolist() == []
