"""The incidents of one rank are the same whether they are read at once or one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampscope
from ampscope.analysis.tables import lazy_tables
from ampscope.analysis.tables.lazy_tables import IncidentRows
from ampscope.trace.schema import ReplayStatus, Trigger
from tests.support.trace_builder import START, TraceBuilder


@pytest.mark.parametrize("most", [2, 2000], ids=["one by one", "at once"])
def test_an_incident_is_found_by_step_optimizer_and_trigger(
    most: int, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_tables, "MOST_AT_ONCE", most)
    trace = TraceBuilder(run_folder)
    trace.incident(step=3, trigger=Trigger.NONFINITE_LOSS, loss=1.0, time=START + 1)
    trace.incident(step=3, trigger=Trigger.NONFINITE_LOSS, loss=2.0, time=START + 2)
    trace.incident(step=3, trigger=Trigger.NONFINITE_GRADIENT, replay=ReplayStatus.DIVERGED)
    trace.incident(step=3, optimizer=1, trigger=Trigger.NONFINITE_LOSS, loss=3.0)
    trace.incident(step=9, trigger=Trigger.NONFINITE_GRADIENT, replay=ReplayStatus.DIVERGED)
    trace.incident(step=10, trigger=Trigger.NONFINITE_GRADIENT, replay=ReplayStatus.UNAVAILABLE)
    with ampscope.open_run(trace.close()) as run:
        rows = IncidentRows(run, 0)
        newest, other = rows.find(3, 0, Trigger.NONFINITE_LOSS), rows.find(3, 1, Trigger.NONFINITE_LOSS)
        assert newest is not None
        assert other is not None
        assert (newest.loss, other.loss) == (2.0, 3.0)
        assert rows.find(4, 0, Trigger.NONFINITE_LOSS) is None
        assert rows.find(9, 1, Trigger.NONFINITE_GRADIENT) is None
        diverged = rows.find(9, 0, Trigger.NONFINITE_GRADIENT)
        assert diverged is not None
        assert rows.alike(diverged) == 2
        assert rows.alike(newest) == 1
