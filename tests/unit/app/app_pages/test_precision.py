from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_reading import Show
from tests.support.trace_builder import TraceBuilder


def test_the_precision_page_says_why_float32_was_used(show: Show) -> None:
    words = show("healthy", "precision").words
    assert "57 % in float16, 43 % in float32. Autocast was on, in float16." in words
    assert "autocast converts its operands" in words
    assert "its operands are float32 already" in words
    assert "2,097,152" in words


def test_a_run_without_traced_steps_says_how_to_trace_one(show: Show) -> None:
    assert "every=500" in show("finding", "precision").words


def test_the_line_to_paste_names_a_scaler_where_there_is_one(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    for name, columns in (("scaled", {}), ("plain", {"scale": None, "found_inf": None, "growth_tracker": None})):
        trace = TraceBuilder(tmp_path / name)
        trace.step(**columns)
        trace.close()
    assert "ampscope.watch(model, scaler, every=500)" in show("scaled", "precision", real=True).words
    assert "ampscope.watch(model, every=500)" in show("plain", "precision", real=True).words


def test_a_module_that_is_not_there_is_said_and_all_are_shown(show: Show) -> None:
    shown = show("healthy", "precision", module="<b>nowhere</b>")
    assert "there is no <b>nowhere</b> here; this is the whole model" in shown.words
    assert "<b>nowhere</b>" not in "".join(shown.raw)
    assert '"amp-share-name">blocks.3' in "".join(shown.raw)
