from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.results import Tried
from ampscope.report.html.incident_sections import replay_table
from ampscope.trace.schema import Change, Trial, Trigger
from tests.support.page_reading import Show
from tests.support.paths import SAMPLES
from tests.support.saved_operands import MM, content, save
from tests.support.scenes import HOSTILE
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.of_scenes import CALIBRATION, OVERFLOW


def test_a_harmless_incident_is_told_calmly(seen: Show) -> None:
    words = seen("healthy", "incident").words
    assert "Harmless: nothing needs to change." in words
    assert CALIBRATION.explanation in words


def test_a_link_opens_the_incident_that_it_names(seen: Show) -> None:
    assert "The scale finding its place" in seen("overflow", "incident", incident="0-benign_initial_calibration").words
    assert OVERFLOW.explanation in seen("overflow", "incident").words


def test_the_way_leads_from_the_origin_to_the_loss(seen: Show) -> None:
    words = " ".join(seen("overflow", "incident", tab="the-path").words.split())
    chain = words[words.index("blocks.3.attn bmm origin") :]
    assert chain.index("origin") < chain.index("softmax") < chain.index("loss reached")
    assert "outside the watched modules" in words


def test_every_remedy_says_whether_it_was_tried(seen: Show) -> None:
    words = seen("overflow", "incident", tab="what-to-change").words
    for mark in ("tried on this step: cures it", "not tried: ", "tried on this step: does not cure it"):
        assert mark in words


def test_how_it_was_found_and_checked_is_told(seen: Show) -> None:
    words = seen("overflow", "incident").words
    assert "came out the same in all that is compared" in words
    assert "In float32 the same step stays finite" in words
    assert "and 4 more parameters" in words
    assert "14 inf" in seen("overflow", "incident", tab="evidence").words


def test_a_long_path_keeps_its_ends_and_counts_the_rest(seen: Show) -> None:
    assert "27 more ops" in seen("hostile", "incident", tab="the-path").words


def test_an_incident_of_unknown_origin_says_how_to_see_more(seen: Show) -> None:
    assert "every=1" in seen("overflow", "incident", real=True).words


def test_one_of_known_origin_does_not(seen: Show) -> None:
    assert "every=1" not in seen("overflow", "incident").words


def test_without_kept_operands_it_says_how_to_keep_them(seen: Show) -> None:
    words = seen("overflow", "incident", tab="take-it-along").words
    assert "save_tensors=True" in words


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TraceBuilder:
    """A run whose second matrix product overflows in a function of three traced lines; its step was tried again."""
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "failing")
    trace.step(loss=float("nan"), traced="replay")
    lines = {"file": "/home/me/model.py", "function": "forward"}
    first = trace.site("aten.mm.default", module="a", line=3, code="h = self.a(x)", **lines)
    second = trace.site("aten.bmm.default", module="b", line=5, code="y = h @ h.T", **lines)
    third = trace.site("aten.relu.default", module="b", line=9, code="return y.relu()", **lines)
    loss = trace.site("loss", name="loss", module="", phase="loss", file="")
    bad = {"min": float("inf"), "max": float("inf"), "posinf": 64, "exp_counts": (), "exp_low": None}
    trace.op(first)
    trace.op(second, **bad)
    trace.op(third, **bad)
    trace.op(loss, **bad)
    trace.edge(0, 1)
    trace.edge(1, 2)
    trace.edge(1, 3)
    trace.incident(trigger="nonfinite_loss", loss=float("inf"))
    return trace


def test_the_line_stands_among_those_that_were_traced(show: Show, failing: TraceBuilder) -> None:
    failing.close()
    raw = "".join(show("failing", "incident", real=True).raw).replace("<wbr>", "")
    assert '<span class="amp-number">3</span><code>h = self.a(x)</code>' in raw
    assert '<code class="hit">y = h @ h.T</code>' in raw
    assert raw.index("amp-gap") > raw.index("h = self.a(x)")


def test_what_moved_since_the_last_good_step_is_told(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "fast")
    for _ in range(5):
        trace.step()
    trace.step(loss=float("nan"), lr=1.0)
    trace.incident(step=5, trigger="nonfinite_loss", loss=float("nan"))
    trace.close()
    words = " ".join(show("fast", "incident", real=True).words.split())
    assert "Since the last good step Last good step: 4." in words
    assert "learning rate 0.001 1 5 it had never moved" in words


def test_before_the_first_step_none_was_good(show: Show, failing: TraceBuilder) -> None:
    failing.close()
    assert "Last good step: none, for this is the first step." in show("failing", "incident", real=True).words


def test_healthy_neighbours_stand_beside_the_origin(show: Show, failing: TraceBuilder) -> None:
    failing.close()
    words = " ".join(show("failing", "incident", real=True, tab="the-path").words.split())
    assert "what the origin read mm operand 0 -1 to 1" in words
    assert "What else read the origin's result relu b inf" in words


def test_what_was_tried_is_told_in_words(show: Show, failing: TraceBuilder) -> None:
    tried = {"loss": 2.5, "op_min": -7.0, "op_max": 90000.0}
    failing.replay(Change.FP32, Trial.FINITE, **tried)
    failing.replay(Change.SCALE, Trial.NONFINITE, scale=1024.0, loss=None)
    failing.replay(Change.MODULES_FP32, Trial.UNAVAILABLE, modules=("a", "(loss)"), reason="out of memory")
    failing.close()
    words = " ".join(show("failing", "incident", real=True, tab="what-was-tried").words.split())
    assert "everything in float32 \N{CHECK MARK} finite: cures this step 2.5 -7 to 90,000 250 ms" in words
    assert "a loss scale of 1,024 (2¹⁰) \N{MULTIPLICATION X} still not finite" in words
    assert "a and the loss code in float32 could not be run: out of memory" in words


@pytest.mark.parametrize(
    ("trigger", "cured", "not_cured"),
    [
        (Trigger.ABSORBED_OVERFLOW, "agrees with float32: cures this step", "does not agree with float32"),
        (Trigger.LOST_GRADIENT, "keeps its gradients: cures this step", "still loses gradients"),
    ],
)
def test_what_was_tried_on_a_step_that_was_finite_is_not_told_as_finite(
    trigger: Trigger, cured: str, not_cured: str
) -> None:
    outcomes = (Trial.FINITE, Trial.NONFINITE)
    tried = [Tried(step=0, change=Change.MODULES_FP32, modules=("a",), outcome=outcome) for outcome in outcomes]
    table = replay_table(tried, trigger)
    assert cured in table
    assert not_cured in table
    assert "finite:" not in table
    assert "not finite" not in table


def test_an_outcome_of_a_strangers_trace_is_none_that_cures() -> None:
    table = replay_table([Tried(step=0, change=Change.FP32, outcome="splendid")], Trigger.ABSORBED_OVERFLOW)
    assert "could not be run" in table
    assert "cures this step" not in table


def test_float32_shows_how_far_beyond_float16_the_result_reaches(show: Show, failing: TraceBuilder) -> None:
    failing.replay(Change.FP32, Trial.FINITE, op_min=-7.0, op_max=90000.0)
    failing.close()
    assert "in float32 this op reaches 90,000" in show("failing", "incident", real=True, tab="evidence").words


def test_a_link_leads_into_the_step_at_the_origin(show: Show, failing: TraceBuilder) -> None:
    failing.close()
    links = [element.proto for element in show("failing", "incident", real=True).test.get("page_link")]
    to_replay = next(link for link in links if "replay" in link.page)
    assert {"step=0", "source=replay", "op=1"} <= set(to_replay.query_string.split("&"))


def test_every_part_of_the_path_leads_on(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(SAMPLES))
    path = show("attention-overflow", "incident", real=True, tab="the-path")
    (graph,) = (body for body in path.raw if 'class="amp-graph' in body)
    for way in ("replay?run=attention-overflow&amp;op=", "precision?run=attention-overflow", "ranges?run="):
        assert f'href="{way}' in graph
    assert 'href=""' not in graph
    shown = show("attention-overflow", "incident", real=True)
    (names,) = (body for body in shown.raw if 'class="amp-code amp-names"' in body)
    assert names.count('href="ranges?run=attention-overflow&amp;place=') == 12
    before = shown.tables["Largest magnitudes in the recorded steps up to it"]
    assert [row["Tensor"] for row in before] == [
        "what the op gave (blocks.0.attention)",
        "operand 0 (blocks.0.attention)",
        "operand 1 (blocks.0.attention)",
    ]
    assert {int(row["Last recorded up to it"]) for row in before} == {294}
    assert float(before[1]["Largest at last"]) > 30 * float(before[1]["Largest then"])


def test_which_tab_is_open_is_in_the_address(seen: Show) -> None:
    shown = seen("overflow", "incident", tab="the-path")
    assert [tab.label for tab in shown.test.tabs][:3] == ["What happened", "What to change", "The path"]
    assert shown.address["tab"] == "the-path"
    assert "tab" not in seen("overflow", "incident").address
    assert seen("finding", "incident", tab="the-path").address["tab"] == "what-happened"


def test_a_failed_op_can_be_taken_along_as_a_script(show: Show, failing: TraceBuilder) -> None:
    run = failing.close()
    call = replace(MM, step=0, seq=1, op="aten.bmm.default")
    save(run, content(call), call=call)
    shown = show("failing", "incident", real=True, tab="take-it-along")
    assert [button.proto.label for button in shown.test.get("download_button")] == ["repro.py"]
    assert "as it ran and in a wider dtype" in shown.words
    assert "save_tensors" not in shown.words


def test_operands_that_cannot_be_read_leave_the_page_usable(show: Show, failing: TraceBuilder) -> None:
    run = failing.close()
    call = replace(MM, step=0, seq=1, op="aten.bmm.default")
    save(run, content(call)[:40], call=call)
    shown = show("failing", "incident", real=True, tab="take-it-along")
    assert "is not a whole file of operands" in shown.words
    assert "bmm" in shown.words


def test_names_in_the_surroundings_stay_text(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "nasty")
    trace.step(loss=float("nan"))
    names = {"file": HOSTILE, "function": HOSTILE, "code": HOSTILE, "module": HOSTILE}
    first = trace.site("aten.mm.default", line=3, **names)
    second = trace.site("aten.bmm.default", line=4, **names)
    loss = trace.site("loss", phase="loss", name=HOSTILE, module="")
    trace.op(first)
    trace.op(second, min=float("nan"), max=float("nan"))
    trace.op(loss, min=float("nan"), max=float("nan"))
    trace.edge(0, 1)
    trace.edge(1, 2)
    trace.incident(trigger="nonfinite_loss", loss=float("nan"))
    trace.close()
    tabs = [tab.label.lower().replace(" ", "-") for tab in show("nasty", "incident", real=True).test.tabs]
    assert "the-path" in tabs
    for tab in tabs:
        shown = show("nasty", "incident", real=True, tab=tab)
        assert shown.address.get("tab", tabs[0]) == tab
        assert not [body for body in shown.raw if "<script" in body or "<b>bold" in body]


def test_nothing_wrong_is_a_sentence_not_an_empty_page(seen: Show) -> None:
    assert "Nothing went wrong in this run" in seen("empty", "incident").words
