"""What the browser's tab says of the run on screen."""

from __future__ import annotations

import math
import re
from pathlib import Path
from urllib.parse import unquote

from ampscope.trace.vocabulary import Verdict
from blocks.sidebar import tab_icon, tab_of
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
    assert tab_of(runs["good"], with_verdict=True).title == "good - AMPscope"
    assert tab_of(runs["bad"], with_verdict=True).title == "NaN @1 bad - AMPscope"
    assert tab_of(runs["misused"], with_verdict=True).title == "problem @0 misused - AMPscope"
    assert tab_of(runs["bad"], with_verdict=False).title == "bad - AMPscope"
    assert tab_of(runs["bad"], with_verdict=True).icon == tab_icon(Verdict.PROBLEM)
    assert tab_of(runs["good"], with_verdict=True).icon == tab_icon()


def test_a_run_is_told_from_others_that_a_callback_recorded(tmp_path: Path) -> None:
    run = take_snapshot(TraceBuilder(tmp_path / "version_3" / "ampscope").close())
    assert tab_of(run, with_verdict=False).title == "version_3/ampscope - AMPscope"


def test_the_icon_tells_states_apart_by_shape_too() -> None:
    calm, problem = (unquote(tab_icon(verdict)) for verdict in (Verdict.HEALTHY, Verdict.PROBLEM))
    paths = [re.search(r'<path d="([^"]+)"', icon) for icon in (calm, problem)]
    assert len({path[1] for path in paths if path}) == 2
    live = unquote(tab_icon(Verdict.HEALTHY, is_live=True))
    assert "<circle" in live
    assert "<circle" not in calm
    assert tab_icon().startswith("data:image/svg+xml,")
