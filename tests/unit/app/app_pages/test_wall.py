from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.trace.schema import EventKind
from tests.support.page_reading import Show, Shown
from tests.support.paths import ROOT
from tests.support.scenes import overflow

st = pytest.importorskip("streamlit", reason="needs the app's extra: pip install 'ampscope[app]'")


def test_it_tells_the_verdict_and_the_newest_numbers(seen: Show) -> None:
    shown = seen("overflow", "wall")
    words = " ".join(shown.words.split())
    assert "272 optimizer steps" in words
    assert "2 newest loss" in words
    (banner,) = (body for body in shown.raw if 'class="amp-wall' in body)
    assert "<b>problem</b>" in banner
    assert banner.count("260") == 1, "a time is said once"


def test_a_healthy_run_is_calm(seen: Show) -> None:
    shown = seen("healthy", "wall")
    assert "healthy" in shown.words
    assert "not finite" not in shown.words
    assert any('class="amp-wall good"' in body for body in shown.raw)


def test_a_newest_loss_that_is_not_finite_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(ROOT / "sample_logs"))
    st.cache_resource.clear()
    shown = Shown.of("wall", {"run": "attention-overflow"})
    assert "not finite newest loss" in " ".join(shown.words.split())


@pytest.mark.parametrize("page", ["wall", "incident"])
def test_a_failure_that_has_not_come_back_is_said_to_be_past(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = overflow(tmp_path / "went_on")
    trace.event(EventKind.RESUME, "resumed from step 265", step=266)
    trace.close()
    words = " ".join(show("went_on", page, real=True).words.split())
    assert "The run was resumed at step 266, and the failure has not come back in the 6 steps since" in words
