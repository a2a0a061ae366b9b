from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.replay.recording import recording
from ampscope.analysis.replay.track import Track, track
from ampscope.analysis.tables.traced_steps import TracedStep
from tests.support.paths import APP
from tests.support.scenes import HOSTILE
from tests.support.trace_builder import TraceBuilder

pytest.importorskip("plotly", reason="needs the app's extra: pip install 'ampscope[app]'")


@pytest.fixture(autouse=True)
def _app_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(APP)


def drawn(folder: Path, *ops: dict[str, Any], module: str = "fc") -> Track:
    trace = TraceBuilder(folder / "run")
    for columns in ops:
        dtype = columns.pop("dtype", "float16")
        trace.op(trace.site(module=module, out_dtypes=(dtype,)), **columns)
    run = open_run(trace.close())
    return track(recording(run, TracedStep(rank=0, step=0, source="replay", rows=0)))


def test_a_click_anywhere_over_an_op_finds_it(tmp_path: Path) -> None:
    from charts.replay import track_figure

    figure = track_figure(drawn(tmp_path, *({} for _ in range(7))), [f"op {number}" for number in range(7)])
    (target,) = [trace for trace in figure.data if "op 0" in (trace.hovertext or ())]
    assert list(target.customdata) == list(range(7))
    low, high = figure.layout.yaxis.range
    assert {(base, base + tall) for base, tall in zip(target.base, target.y, strict=True)} == {(low, high)}
    for trace in figure.data:
        if trace.type == "bar":  # a click on one dims none of the others
            assert trace.unselected.marker.opacity == trace.marker.opacity


def test_what_is_not_finite_or_near_its_limit_has_a_lane(tmp_path: Path) -> None:
    from charts.replay import height, track_figure

    calm = drawn(tmp_path / "calm", {}, {})
    assert list(track_figure(calm, ["", ""]).layout.yaxis2.ticktext) == ["modules"]
    bad = drawn(tmp_path / "bad", {"max": math.nan, "min": math.nan}, {"max": 6e4, "max_finite": 6e4})
    figure = track_figure(bad, ["", ""])
    assert list(figure.layout.yaxis2.ticktext) == ["modules", "near its limit", "NaN or inf"]
    assert figure.layout.height == height(bad)


def test_a_mask_of_the_lowest_float32_does_not_squeeze_all_else(tmp_path: Path) -> None:
    from charts.replay import track_figure

    seen = drawn(tmp_path, {}, {"dtype": "float32", "min": -3.4e38, "max_finite": 3.4e38})
    low, high = track_figure(seen, ["", ""]).layout.yaxis.range
    assert (low, high) == (-29, 41)


def test_another_step_is_a_line_with_a_lane_for_where_it_differs(tmp_path: Path) -> None:
    from charts.replay import Counterpart, track_figure

    seen = drawn(tmp_path, {}, {})
    figure = track_figure(seen, ["", ""], Counterpart(np.array([1.0, np.nan]), [1]))
    assert "differs" in figure.layout.yaxis2.ticktext
    assert (1.0, None) in [tuple(trace.y) for trace in figure.data]


def test_a_track_of_nothing_measured_or_of_one_op_can_be_drawn(tmp_path: Path) -> None:
    from charts.replay import track_figure

    bare = dict.fromkeys(["min", "max", "max_finite", "min_positive"])
    assert track_figure(drawn(tmp_path, {**bare, "dtype": "int64"}), [""]).to_json()


def test_names_of_modules_are_escaped(tmp_path: Path) -> None:
    from charts.replay import track_figure

    told = track_figure(drawn(tmp_path, {}, module=HOSTILE), [""]).to_json()
    assert "<script" not in told
    assert "<b>bold" not in told
