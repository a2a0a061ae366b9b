"""What the browser's tab says of the run on screen."""

from __future__ import annotations

import math
from pathlib import Path

from blocks.frame.tab_title import tab_title
from data.run_snapshot import take_snapshot
from tests.support.trace_builder import TraceBuilder


def test_it_says_what_broke_where_and_of_which_run(tmp_path: Path) -> None:
    good, bad = TraceBuilder(tmp_path / "good"), TraceBuilder(tmp_path / "bad")
    misused = TraceBuilder(tmp_path / "misused")
    for trace in (good, bad, misused):
        trace.step()
    bad.step(loss=math.nan, skipped=True)
    bad.incident(step=1, trigger="nonfinite_loss", loss=math.nan)
    misused.finding()
    runs = {trace.folder.name: take_snapshot(trace.close()) for trace in (good, bad, misused)}
    assert tab_title(runs["good"], with_verdict=True) == "good - AMPscope"
    assert tab_title(runs["bad"], with_verdict=True) == "NaN @1 bad - AMPscope"
    assert tab_title(runs["misused"], with_verdict=True) == "problem @0 misused - AMPscope"
    assert tab_title(runs["bad"], with_verdict=False) == "bad - AMPscope"
