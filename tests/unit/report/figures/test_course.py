"""The figure of one place over steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision.ranges.measured import measured_places
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail, place_detail
from ampscope.report.figures.course_figure import course_figure
from tests.support.verdicts.growing import growing


@pytest.fixture
def grown(run_folder: Path) -> PlaceDetail:
    with open_run(growing(run_folder).close()) as run:
        found = measured_places(run)
        key = next(each.place.key for each in found.places if each.place.module == "blocks.1" and each.scale is None)
        seen = place_detail(run, found, key)
    assert seen is not None
    return seen


def test_a_forecast_is_a_cone_to_the_end_of_the_dtype(grown: PlaceDetail) -> None:
    seen = course_figure(grown)
    assert seen.cone is not None
    assert grown.forecast is not None
    assert (seen.cone.start, seen.cone.power) == (195, grown.course.values[-1])
    assert (seen.cone.low, seen.cone.step, seen.cone.high) == grown.forecast[1:2] + grown.forecast[:1] + grown.forecast[
        2:3
    ]
    assert seen.cone.end == pytest.approx(math.log2(65504.0))
    assert seen.ends[0].words == "float16 overflows above 65,504"
    assert seen.low < min(grown.course.values)
    assert seen.high > grown.limit


def test_an_end_that_is_far_away_does_not_flatten_the_course(grown: PlaceDetail) -> None:
    wide = replace(grown, limit=128.0, normal=-126.0, forecast=None, row=replace(grown.row, dtype="float32"))
    seen = course_figure(wide)
    assert (seen.ends, seen.cone) == ((), None)
    assert seen.high < 16


def test_where_it_overflowed_the_end_is_always_there(grown: PlaceDetail) -> None:
    seen = course_figure(replace(grown, limit=128.0, normal=-126.0, overflows=(7,), forecast=None))
    assert seen.overflows == (7,)
    assert [end.power for end in seen.ends] == [128.0]
