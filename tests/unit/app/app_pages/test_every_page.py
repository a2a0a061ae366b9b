"""What holds of every page, whatever a trace holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ampscope.trace.schema import ScalerAction
from state import Page
from tests.support.page_reading import Show
from tests.support.scenes import HOSTILE, SCENES
from tests.support.trace_builder import TraceBuilder

each_page = pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in Page])


@each_page
@pytest.mark.parametrize("scene", SCENES)
def test_it_is_drawn_of_every_scene(seen: Show, scene: str, page: Page) -> None:
    assert seen(scene, page.stem, real=True).test.title[0].value == page.title


@each_page
@pytest.mark.parametrize("real", [False, True], ids=["verdict by hand", "real verdict"])
def test_names_from_a_trace_are_never_markup(seen: Show, page: Page, real: bool) -> None:
    """A verdict by hand has names where no diagnosis puts them: in a cause, a remedy, a sentence."""
    shown = seen("hostile", page.stem, real=real)
    assert shown.test.title[0].value == page.title
    for body in shown.raw:
        assert "<script" not in body
        assert "<b>bold" not in body
    for element in (*shown.test.markdown, *shown.test.caption, *shown.test.header, *shown.test.title):
        assert HOSTILE[:20] not in element.value
    for figure in shown.figures:
        assert "<script" not in figure
        assert "<b>bold" not in figure


INF, NAN = math.inf, math.nan
STEPS = {
    "time": (INF, NAN, -INF, 1e300, 0.0, -1e300),
    "loss": (NAN, 1e308, -1e308, 0.0, INF, 1.0),
    "scale": (INF, -1.0, NAN, 0.0, 1e300, 5e-324),
    "grad_norm": (-1.0, 0.0, NAN, INF, 1e308, 5e-324),
    "lr": (NAN, INF, -INF, 0.0, -1.0, 1.0),
    "growth_tracker": (-5, 2**31 - 1, 0, 1, 2, None),
    "duration_s": (NAN, INF, -1.0, 0.0, 1e30, -0.0),
}
SETTINGS = '{"init_scale": 1e999, "growth_interval": -3, "growth_factor": 0, "backoff_factor": -1e300}'


@pytest.fixture(scope="module")
def absurd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of absurd numbers."""
    folder = tmp_path_factory.mktemp("absurd")
    trace = TraceBuilder(folder / "absurd", created=1e300)
    trace.scaler_event(ScalerAction.INIT, scale_before=None, scale_after=INF, detail=SETTINGS)
    param = trace.param("w")
    for step in range(6):
        trace.step(**{name: values[step] for name, values in STEPS.items()}, skipped=step % 2 == 0, micro_batches=-1)
        trace.grad(step=step, param=param, max_abs=NAN, nonfinite=True, underflow=INF)
    trace.incident(step=2, time=NAN, loss=NAN, scale=INF, evidence="[1, 2]")
    trace.incident(step=4, evidence='{"rows": 7}', trigger="no such")
    trace.finding("no such", step=-7, form="no such", evidence='{"optimizer_steps": null}')
    trace.event("no such", "x", step=-9)
    site = trace.site()
    trace.op(site, step=2, min=NAN, max=-INF, numel=-4, exp_low=-3000, exp_counts=(-1, 0, 2**62))
    trace.edge(step=2, from_seq=99, seq=0)
    trace.close()
    return folder


@each_page
def test_numbers_that_cannot_be_shown_leave_the_rest(
    show: Show, absurd: Path, monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(absurd))
    assert show("absurd", page.stem, real=True).test.title


@each_page
def test_every_link_keeps_the_run(seen: Show, page: Page) -> None:
    other = {"b": "overflow"} if page is Page.COMPARE else {}  # whose second side may be another run
    for label, query in seen("overflow", page.stem, step="260", **other).links.items():
        assert "run=overflow" in query, label
