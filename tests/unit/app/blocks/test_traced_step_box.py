"""The choice among traced steps, on the pages that have one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_reading import Show
from tests.support.trace_builder import TraceBuilder


@pytest.mark.parametrize("page", ["precision", "replay"])
def test_a_step_traced_since_the_page_was_drawn_is_offered(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "live")
    site = trace.site()
    trace.step(traced="live")
    trace.op(site, step=0, source="live")
    trace.leave_open()
    shown = show("live", page)
    assert "has been traced since" not in shown.words
    trace.step(traced="live")
    trace.leave_open()  # its ops come with the next look: what is on screen must not depend on them
    shown.test.run()
    assert "Step 1 has been traced since" in shown.words


def test_of_very_many_traced_steps_some_are_listed_and_any_can_be_gone_to(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "long")
    site = trace.site()
    for step in range(0, 2000, 2):
        trace.op(site, step=step, source="live")
    trace.op(site, step=100, source="replay")
    trace.close()
    shown = show("long", "precision")
    box = shown.test.selectbox(key="traced")
    assert len(box.options) < 400
    assert {"Step 1,998, recorded as it ran", "Step 0, recorded as it ran", "Step 100, replayed"} <= set(box.options)
    (number,) = shown.test.number_input
    number.set_value(999).run()
    assert shown.test.selectbox(key="traced").value in ("1000-live", "998-live")
    assert show("long", "precision", step="500").test.selectbox(key="traced").value == "500-live"
