"""The page that sets two runs, or two steps, against each other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ampscope.analysis.replay.compare import comparison
from ampscope.trace.schema import Node
from tests.support.page_reading import Show, Shown
from tests.support.trace_builder import TraceBuilder


def write(folder: Path, peaks: tuple[float, ...], *, loss: float = 2.0, **manifest: Any) -> None:
    """A run whose steps are two products each; the second has these largest elements."""
    trace = TraceBuilder(folder, **manifest)
    sites = [
        trace.site(Node.INPUT, name="args[0]", in_dtypes=()),
        trace.site("aten.mm.default", module="fc1", line=11),
        trace.site("aten.mm.default", module="fc2", line=12),
    ]
    for step, peak in enumerate(peaks):
        trace.step(traced="live", loss=loss)
        ops = [trace.op(site, step=step, source="live", max=top) for site, top in zip(sites, (1, 2, peak), strict=True)]
        for before, after in pairwise(ops):
            trace.edge(before, after, step=step, source="live")
    trace.close()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs, of which B is another from step 1 on, in fc2."""
    write(tmp_path / "one", (4.0, 4.0, 4.0), device="cpu", created=1.7e9 + 1)
    write(tmp_path / "two", (4.0, 5.0, 4.0), device="NVIDIA H200", loss=3.0)
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))


def test_two_runs_part_at_an_op_that_is_told_with_its_line_and_its_error(show: Show, pair: None) -> None:
    shown = show("one", "compare", real=True, b="two")
    words = " ".join(shown.words.split())
    assert "Different" in words
    assert "The numbers part at step 1 with mm in fc2" in words
    assert "train.py:12" in words
    assert "0.2 of the largest magnitude apart; rounding allows for" in words
    assert "Device: cpu in A, NVIDIA H200 in B." in words
    assert "3 steps that both traced" in words


def test_links_lead_into_either_side(show: Show, pair: None) -> None:
    links = show("one", "compare", real=True, b="two").links
    assert {"run=one", "step=1", "source=live", "op=2"} <= set(links["Replay A, step 1"].split("&"))
    assert {"run=two", "step=1", "source=live", "op=2"} <= set(links["Replay B, step 1"].split("&"))


def test_the_curves_of_both_lie_on_one_axis(show: Show, pair: None) -> None:
    (figure,) = show("one", "compare", real=True, b="two").figures
    assert "A: loss 2" in figure
    assert "B: loss 3" in figure
    assert "gradient norm (L2, without the loss scale)" in figure
    assert "optimizer step" in figure


def chosen(shown: Shown, box: str) -> object:
    """What a box has."""
    return shown.test.selectbox(key=box).value


def test_a_run_is_compared_with_its_neighbour_at_first(show: Show, pair: None) -> None:
    shown = show("one", "compare", real=True)
    assert (shown.address["a"], shown.address["b"], chosen(shown, "a_step")) == ("one", "two", "whole")
    assert show("two", "compare", real=True).address["a"] == "two"


def test_two_steps_of_one_run(show: Show, pair: None) -> None:
    shown = show("two", "compare", real=True, b="two", a_step="0", b_step="1")
    words = " ".join(shown.words.split())
    assert "The numbers part at step 0 (step 1 in B) with mm in fc2" in words
    assert "against=1-live" in shown.links["Replay A, step 0"]
    again = " ".join(show("two", "compare", real=True, b="two", a_step="0", b_step="2").words.split())
    assert "Identical" in again
    assert "Replay A" not in again


def test_the_same_run_begins_with_two_of_its_steps(show: Show, pair: None) -> None:
    shown = show("one", "compare", real=True, b="one")
    assert (chosen(shown, "a_step"), chosen(shown, "b_step")) == ("2", "1")
    assert "the whole run" not in [option for box in shown.test.selectbox for option in box.options]


def test_another_choice_is_another_comparison(show: Show, pair: None) -> None:
    shown = show("one", "compare", real=True, b="two")
    (box,) = (each for each in shown.test.selectbox if each.label == "Step of A")
    shown = Shown(box.set_value("0").run())
    assert "Identical" in shown.words
    assert shown.address["a_step"] == "0"
    assert (chosen(shown, "a_step"), chosen(shown, "b_step")) == ("0", "0")


def test_it_is_computed_once(show: Show, pair: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = comparison.comparison

    def counting(*sides: Any) -> Any:
        calls.append(sides)
        return real(*sides)

    monkeypatch.setattr("data.step_results.comparison", counting)
    shown = show("one", "compare", real=True, b="two")
    once = len(calls)
    shown.test.run()
    assert (once, len(calls)) == (1, 1)


def test_a_run_alone_without_two_traced_steps_says_so(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    TraceBuilder(tmp_path / "alone").close()
    assert "of which no two steps were traced" in show("alone", "compare", real=True, b="alone").words


def test_a_side_that_cannot_be_read_leaves_the_choice(seen: Show) -> None:
    shown = seen("healthy", "compare", b="no_manifest")
    assert "B cannot be read" in shown.words
    assert {"A", "B"} <= {box.label for box in shown.test.selectbox}


def test_steps_without_a_counterpart_are_said(show: Show, pair: None, tmp_path: Path) -> None:
    write(tmp_path / "none", ())
    assert "These cannot be compared" in show("one", "compare", real=True, b="none").words


def test_a_name_is_text(seen: Show) -> None:
    for body in seen("hostile", "compare", b="healthy").raw:
        assert "<script" not in body


def test_the_list_of_runs_leads_here(show: Show, pair: None) -> None:
    assert "Compare two runs" in show("one", "runs", real=True).links


def test_two_ranks_of_one_run_are_told_apart(seen: Show) -> None:
    shown = seen("ranks", "compare", b="ranks", a_rank="0", b_rank="2")
    words = " ".join(shown.words.split())
    assert "A: ranks, rank 0 B: ranks, rank 2" in words
    assert "The gradient norm parts at step 50" in words
