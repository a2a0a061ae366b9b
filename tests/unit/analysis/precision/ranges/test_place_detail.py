"""A place close up: its course, its forecast, its exponents in one step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision.ranges.measured import measured_places
from ampscope.analysis.precision.ranges.place_detail import PlaceDetail, place_detail, place_details
from ampscope.trace.schema import Source
from tests.support.verdicts.growing import RATE, growing


def detail(folder: Path, op: str, step: int | None = None) -> PlaceDetail:
    with open_run(folder) as run:
        found = measured_places(run)
        place = next(each.place for each in found.places if each.place.op == op and each.scale is None)
        seen = place_detail(run, found, place.key, step=step)
    assert seen is not None
    return seen


def test_the_course_and_where_it_goes(run_folder: Path) -> None:
    seen = detail(growing(run_folder).close(), "aten.add.Tensor")
    assert seen.course.steps == tuple(range(0, 200, 5))
    assert seen.course.values == pytest.approx([math.log2(8.0 * RATE**step) for step in range(0, 200, 5)])
    assert seen.limit == pytest.approx(math.log2(65504.0))
    assert seen.forecast is not None
    assert (seen.forecast.step, seen.row.module) == (seen.row.forecast_step, "blocks.1")
    assert (seen.row.largest_step, seen.row.largest_last) == (195, 195)


def test_the_step_of_the_largest_value_is_looked_at_unless_another_is_asked_for(run_folder: Path) -> None:
    folder = growing(run_folder).close()
    for asked, shown in ((None, 195), (100, 100), (103, 100), (-4, 0), (10_000, 195)):
        seen = detail(folder, "aten.add.Tensor", asked).seen
        assert seen is not None
        assert (seen.step, seen.source) == (shown, Source.LIVE)


def test_of_equals_the_first_step_is_looked_at_as_it_is_told(run_folder: Path) -> None:
    trace = growing(run_folder)
    for step in (100, 150):
        trace.op(0, step=step, source=Source.LIVE, min=-60000.0, max=0.0)
    seen = detail(trace.close(), "aten.add.Tensor")
    assert seen.seen is not None
    assert (seen.seen.step, seen.row.largest_step) == (100, 100)


def test_the_op_is_that_with_the_largest_value(run_folder: Path) -> None:
    trace = growing(run_folder)
    trace.op(0, step=100, source=Source.LIVE, min=-60000.0, max=0.0)
    seen = detail(trace.close(), "aten.add.Tensor").seen
    assert seen is not None
    assert (seen.step, seen.seq) == (100, 7)


def test_exponents_are_those_of_the_step_or_the_nearest_with_any(run_folder: Path) -> None:
    folder = growing(run_folder)
    assert detail(folder.close(), "aten.add.Tensor").counted is None
    trace = growing(run_folder.with_name("counted"))
    for step in (20, 60):
        trace.op(0, step=step, source=Source.LIVE, min=-8.0, max=8.0, exp_low=-2, exp_counts=(1, 2, step))
    folder_of = trace.close()
    for asked, shown in ((20, 20), (35, 20), (55, 60), (None, 60)):
        seen = detail(folder_of, "aten.add.Tensor", asked).counted
        assert seen is not None
        assert (seen.step, seen.written.exp_counts) == (shown, (1, 2, shown))
        assert seen.written.dtype == "float16"


def test_a_place_that_is_not_there(run_folder: Path) -> None:
    with open_run(growing(run_folder).close()) as run:
        assert place_detail(run, measured_places(run), "0" * 12) is None


def test_several_places_are_seen_as_each_by_itself(run_folder: Path) -> None:
    with open_run(growing(run_folder).close()) as run:
        found = measured_places(run)
        keys = [each.place.key for each in found.places]
        together = place_details(run, found, keys, step=100)
        assert len(together) == len(keys) > 2
        assert together == {key: place_detail(run, found, key, step=100) for key in keys}
        assert place_details(run, found, ["0" * 12]) == {}
