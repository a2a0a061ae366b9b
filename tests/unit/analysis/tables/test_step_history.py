"""The step history of each optimizer, whatever lies in the files and in which order."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import ampscope
from ampscope.analysis.tables.step_history import histories
from ampscope.trace.schema import Table
from tests.support.trace_builder import TraceBuilder


def test_each_optimizer_has_its_own_steps_in_order(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in (4, 1, 0, 3, 2):
        for optimizer in (1, 0):
            trace.step(step=step, optimizer=optimizer, loss=10.0 * step + optimizer, skipped=step == 3)
    with ampscope.open_run(trace.close()) as run:
        found = histories(run, 0)
    assert list(found) == [0, 1]
    for number, history in found.items():
        assert history.optimizer == number
        assert history.step.tolist() == [0, 1, 2, 3, 4]
        assert history.loss.tolist() == [10.0 * step + number for step in range(5)]
        assert history.skipped.tolist() == [False, False, False, True, False]


def test_what_is_not_known_is_told_from_what_is_no_number(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(loss=None, scale=None)
    trace.step(loss=math.nan, lr=None)
    trace.step(loss=1.0, averaged=7)
    with ampscope.open_run(trace.close()) as run:
        (history,) = histories(run, 0).values()
    assert history.has_loss.tolist() == [False, True, True]
    assert np.isnan(history.loss).tolist() == [True, True, False]
    assert np.isnan(history.scale).tolist() == [True, False, False]
    assert np.isnan(history.lr).tolist() == [False, True, False]
    assert history.thinned.tolist() == [False, False, True]
    assert history.bad_loss.tolist() == [False, True, False]


def test_a_run_without_steps_has_none(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.event()
    with ampscope.open_run(trace.close()) as run:
        assert histories(run, 0) == {}


def test_it_is_read_again_only_when_steps_have_come(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    trace.leave_open()
    with ampscope.open_run(run_folder) as run:
        first = histories(run, 0)
        with monkeypatch.context() as patched:
            patched.setattr("ampscope.analysis.tables.step_history.stream_columns", None)
            assert histories(run, 0) is first
        trace.step()
        trace.leave_open()
        assert histories(run, 0)[0].step.tolist() == [0, 1]
        assert len(run.rows(Table.STEPS)) == 2
    trace.close()
