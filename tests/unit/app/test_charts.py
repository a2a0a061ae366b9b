from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ampscope import open_run
from ampscope.analysis.arrays import Curve
from ampscope.analysis.overview.overview import Overview, overview
from ampscope.report.figures.stack import Stack, measure_panel
from ampscope.report.figures.step_figures import timeline_stack
from ampscope.report.html.markup import as_html, as_label, as_source
from ampscope.report.safe_text import short
from tests.support.paths import APP
from tests.support.scenes import overflow
from tests.support.verdicts.of_scenes import CALIBRATION, CLIPPED, OVERFLOW

pytest.importorskip("plotly", reason="needs the app's extra: pip install 'ampscope[app]'")


@pytest.fixture(autouse=True)
def _app_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(APP)


def lanes_of(figure: Any) -> list[str]:
    return [text for axis in figure.select_yaxes() for text in axis.ticktext or () if not text.startswith("2")]


def test_a_loss_that_is_not_finite_is_marked_at_the_top_edge(tmp_path: Path) -> None:
    from charts import TOP, stack_figure

    seen = overview(open_run(overflow(tmp_path / "run").close()))
    figure = stack_figure(timeline_stack(seen, [OVERFLOW, CALIBRATION, CLIPPED]))
    edges = [(tuple(trace.x), set(trace.y)) for trace in figure.data if trace.marker.symbol == "triangle-up"]
    assert ((260, 264), {TOP}) in edges
    assert {"problem", "warning", "harmless", "step skipped", "state saved", "resumed"} <= set(lanes_of(figure))


def test_thousands_are_separated_on_every_axis(tmp_path: Path) -> None:
    from charts import stack_figure

    figure = stack_figure(timeline_stack(overview(open_run(overflow(tmp_path / "run").close())), []))
    told = [axis for axis in figure.select_yaxes() if axis.nticks]
    assert told
    assert all(axis.tickformat == ",~g" for axis in told)
    assert all(axis.tickformat == "," for axis in figure.select_xaxes())


def test_a_rate_is_written_as_other_numbers() -> None:
    from charts import stack_figure

    def format_of(*rates: float) -> str:
        panel = measure_panel(Curve(steps=(0, 1), values=rates), "learning rate", "")
        figure = stack_figure(Stack(label="", panels=(panel,)))
        return next(str(axis.tickformat) for axis in figure.select_yaxes() if axis.nticks)

    assert format_of(1e-4, 3e-4) == ",~g"
    assert format_of(1e-5, 3e-5) == format_of(1e7, 3e7) == "~e"


def test_a_timeline_of_nan_alone_can_be_drawn() -> None:
    from charts import stack_figure

    nan = Curve(nonfinite=(0, 1), nonfinite_count=2)
    assert stack_figure(timeline_stack(Overview(steps=2, loss=nan, grad_norm=nan, log2_scale=nan), [])).to_json()


def test_panels_without_a_measurement_are_left_out() -> None:
    from charts import stack_figure

    figure = stack_figure(timeline_stack(Overview(steps=1, loss=Curve(steps=(0,), values=(1.0,))), []))
    assert [note.text for note in figure.layout.annotations] == ["loss"]


@pytest.mark.parametrize("values", [(0.0, 0.0), (5.0, 5.0), (-3.0, 1e30), (1e-30, 1e30), (0.0, 1.0)])
def test_a_measure_of_any_extent_has_a_finite_axis(values: tuple[float, ...]) -> None:
    from charts import stack_figure

    for log in (False, True):
        panel = measure_panel(Curve(steps=(0, 1), values=values), "loss", "", log=log)
        figure = stack_figure(Stack(label="", panels=(panel,)))
        axis = next(figure.select_yaxes(row=1, col=1, secondary_y=False))
        assert all(math.isfinite(bound) for bound in axis.range)
        assert axis.range[0] < axis.range[1]


@pytest.mark.parametrize("extent", [(0.29, 0.31), (1.0, 1.0001), (0.1, 0.9), (3.0, 4e9), (1e-40, 1e30)])
def test_a_logarithmic_axis_has_labels_inside(extent: tuple[float, float]) -> None:
    from charts import stack_figure

    panel = measure_panel(Curve(steps=(0, 1), values=extent), "gradient norm", "", log=True)
    figure = stack_figure(Stack(label="", panels=(panel,)))
    axis = next(figure.select_yaxes(row=1, col=1, secondary_y=False))
    inside = [tick for tick in axis.tickvals if axis.range[0] - 1e-9 <= math.log10(tick) <= axis.range[1] + 1e-9]
    assert 2 <= len(inside) <= 10


def test_labels_for_figures_are_escaped() -> None:
    assert as_label("<b>$x$</b> & %{y}") == "&lt;b&gt;&#36;x&#36;&lt;/b&gt; &amp; %{y}"
    assert "\u202e" not in as_source("a\u202eb") + as_html("a\u202eb")
    assert len(short("x" * 10_000, 40)) == 40
    assert as_source("if a:\n    b") == "if a:\n    b"
