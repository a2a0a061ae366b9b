"""A trace may hold any number: pages show what can be shown of it and fall over none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ampscope.trace.schema import ScalerAction
from tests.support.trace_builder import TraceBuilder
from tests.unit.app.conftest import Show

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.parametrize("page", ["overview", "incident", "replay", "scale", "precision", "usage", "runs"])
def test_a_page_is_drawn_all_the_same(show: Show, folder: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(folder))
    assert show("absurd", page, real=True).test.title
