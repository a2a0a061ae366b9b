from __future__ import annotations

from typing import Any

import pytest

from ampscope.analysis.arrays import Curve
from ampscope.report.figures.course_figure import Cone, CourseFigure, End
from tests.support.paths import APP

pytest.importorskip("plotly", reason="needs the app's extra: pip install 'ampscope[app]'")

CONE = Cone(start=10, power=4.0, end=16.0, step=40, low=30, high=60, words="overflows near step 40 (30 to 60)")


@pytest.fixture(autouse=True)
def _app_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(APP)


def drawn(**changes: Any) -> Any:
    from charts import course_chart

    facts: dict[str, Any] = {
        "label": "",
        "axis_name": "largest magnitude",
        "course": Curve(steps=(0, 5, 10), values=(1.0, 2.5, 4.0)),
        "ends": (End(power=16.0, words="float16 overflows above 65,504"),),
        "cone": CONE,
        "overflows": (),
        "marked": None,
        "low": 0.0,
        "high": 17.0,
        "ticks": ((0, "1"), (8, "2")),
    }
    return course_chart(CourseFigure(**{**facts, **changes}))


def test_a_forecast_opens_from_the_newest_point_to_the_end_of_the_dtype() -> None:
    wedge, way, course = drawn().data
    assert (list(wedge.x), list(wedge.y)) == ([10, 30, 60, 10], [4.0, 16.0, 16.0, 4.0])
    assert wedge.fill == "toself"
    assert (list(way.x), list(way.y)) == ([10, 40], [4.0, 16.0])
    assert list(course.customdata) == ["largest magnitude 2", "largest magnitude 5.657", "largest magnitude 16"]


def test_the_figure_reaches_to_the_latest_step_of_the_forecast() -> None:
    assert drawn().layout.xaxis.range[1] > 60
    assert drawn(cone=None).layout.xaxis.range[1] < 12


def test_the_ends_are_named_and_overflows_marked() -> None:
    figure = drawn(overflows=(7,), marked=10)
    words = [note.text for note in figure.layout.annotations]
    assert words == ["float16 overflows above 65,504", "step 10"]
    assert [list(trace.x) for trace in figure.data if trace.mode == "markers"] == [[7]]


def test_a_place_that_overflowed_at_once_has_a_figure_too() -> None:
    figure = drawn(course=Curve(), cone=None, overflows=(0,), marked=0)
    low, high = figure.layout.xaxis.range
    assert low < 0 < high
