from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_reading import Show, Shown
from tests.support.scenes import traced_step
from tests.support.trace_builder import TraceBuilder


def test_the_precision_page_says_why_float32_was_used(seen: Show) -> None:
    words = seen("healthy", "precision").words
    assert "57 % in float16, 43 % in float32. Autocast was on, in float16." in words
    assert "autocast converts its operands" in words
    assert "its operands are float32 already" in words
    assert "2,097,152" in words


def test_a_run_without_traced_steps_says_how_to_trace_one(seen: Show) -> None:
    assert "every=500" in seen("finding", "precision").words


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


def test_a_module_that_is_not_there_is_said_and_all_are_shown(seen: Show) -> None:
    shown = seen("healthy", "precision", module="<b>nowhere</b>")
    assert "there is no <b>nowhere</b> here; this is the whole model" in shown.words
    assert "<b>nowhere</b>" not in "".join(shown.raw)
    assert ">blocks.3.norm</a>" in "".join(shown.raw)


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in which fc goes over to float32 at step 40."""
    trace = TraceBuilder(tmp_path / "course")
    half = trace.site(module="fc")
    full = trace.site(module="fc", in_dtypes=("float32",), out_dtypes=("float32",))
    for step in (0, 20, 39, 40, 60):
        trace.step(step=step, traced="live")
        trace.op(full if step >= 40 else half, step=step, source="live")
    trace.close()
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))


def test_it_begins_with_what_became_of_the_dtypes_over_all_traced_steps(show: Show, course: None) -> None:
    shown = show("course", "precision", real=True)
    assert "fc ran in float32 from step 40 on, before in float16." in shown.words
    (figure,) = shown.figures
    assert "share of the ops" in figure
    assert "traced optimizer steps, in order" in figure
    assert "triangle-down" in figure
    assert "a module went over to another dtype" in shown.words


def test_a_click_on_a_column_shows_its_step(show: Show, course: None) -> None:
    shown = show("course", "precision", real=True)
    assert shown.test.selectbox(key="traced").value == "60-live"
    state = shown.test.session_state
    state["traced"] = "20-live"  # what a click does
    shown = Shown(shown.test.run())
    assert shown.address["step"] == "20"
    assert "100 % in float16" in shown.words
    for name in ("step", "source"):  # as Back does
        del shown.test.query_params[name]
    shown = Shown(shown.test.run())
    assert shown.test.selectbox(key="traced").value == "60-live"
    assert "step" not in shown.address


def test_one_traced_step_has_no_course(seen: Show) -> None:
    assert seen("healthy", "precision").figures == []


def test_rows_lead_to_their_first_op_in_replay(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "run")
    trace.step(traced="live")
    traced_step(trace, step=0)
    trace.close()
    shown = show("run", "precision", real=True)
    raw = "".join(shown.raw)
    assert 'href="replay?run=run&amp;step=0&amp;source=live&amp;op=1" target="_self">blocks.0.attn.qkv</a>' in raw
    leads = shown.ways
    address = "replay?run=run&step=0&source=live&op={}"
    assert leads["Ops by dtype"]["aten.bmm.default"] == address.format(2)
    assert leads["Conversions between dtypes"]["by autocast"] == address.format(3)
    assert leads["float32 inside an autocast region"]["aten._softmax.default"] == address.format(4)


def test_a_link_keeps_a_hostile_name_text(seen: Show) -> None:
    raw = "".join(seen("hostile", "precision").raw)
    assert 'class="amp-go"' in raw
    assert "<script" not in raw
