"""Results are computed once, and again only when the tables that they are made of have new rows."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streamlit as st

from ampscope.analysis.precision.ranges.measured import MeasuredRun
from ampscope.analysis.results import PathNode
from ampscope.trace.vocabulary import Verdict
from data import run_results, step_results
from data.run_results import recorded_place_of
from data.run_snapshot import RunSnapshot, take_snapshot
from tests.support.trace_builder import START, TraceBuilder


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    st.cache_resource.clear()


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[TraceBuilder]:
    """A run being written, with one step."""
    trace = TraceBuilder(tmp_path / "run")
    trace.step(traced="live")
    trace.op(trace.site(), step=0, source="live")
    yield trace
    trace.close()


def now(trace: TraceBuilder) -> RunSnapshot:
    """The run as it is at this moment."""
    return take_snapshot(trace.leave_open())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the analyses that were called."""
    calls: list[str] = []

    def count(module: Any, name: str) -> None:
        analysis = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return analysis(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    for name in ("pulse", "diagnose", "overview", "scale_history", "skipped_steps", "precision"):
        count(run_results, name)
    for name in ("traced_steps", "recording"):
        count(step_results, name)
    return calls


BY_OPTIMIZER: dict[str, Callable[[RunSnapshot, int | None], object]] = {
    "overview": run_results.overview_of,
    "scale_history": run_results.scale_history_of,
    "skipped_steps": run_results.skipped_steps_of,
}


@pytest.mark.parametrize("name", BY_OPTIMIZER)
def test_a_new_step_has_it_computed_again_and_nothing_else_does(
    trace: TraceBuilder, computed: list[str], name: str
) -> None:
    for _ in range(2):
        BY_OPTIMIZER[name](now(trace), None)
    trace.op(0, step=0, source="live")
    BY_OPTIMIZER[name](now(trace), None)
    assert computed == [name]
    trace.step()
    BY_OPTIMIZER[name](now(trace), None)
    assert computed == [name, name]


@pytest.mark.parametrize("name", BY_OPTIMIZER)
def test_each_optimizer_has_a_result_of_its_own(trace: TraceBuilder, computed: list[str], name: str) -> None:
    trace.step(optimizer=1)
    run = now(trace)
    for optimizer in (0, 1, None, 0, 1, None):
        BY_OPTIMIZER[name](run, optimizer)
    assert computed == [name] * 3


def test_precision_waits_for_new_ops(trace: TraceBuilder, computed: list[str]) -> None:
    for _ in range(2):
        run_results.precision_of(now(trace), 0, "live")
        trace.step()
    assert computed == ["precision"]
    trace.op(0, step=0, source="live")
    run_results.precision_of(now(trace), 0, "live")
    assert computed == ["precision"] * 2


def test_the_pulse_follows_steps_and_the_end(trace: TraceBuilder, computed: list[str]) -> None:
    for _ in range(2):
        run_results.pulse_of(now(trace))
    trace.step()
    run_results.pulse_of(now(trace))
    assert computed == ["pulse"] * 2
    run_results.pulse_of(take_snapshot(trace.close()))
    assert computed == ["pulse"] * 3


def test_the_verdict_on_a_run_being_written_waits_for_trouble_or_a_fifth_more_steps(
    trace: TraceBuilder, computed: list[str]
) -> None:
    def verdicts() -> int:
        run_results.diagnosis_of(now(trace))
        return computed.count("diagnose")

    for _ in range(19):
        trace.step()
    assert verdicts() == 1
    trace.step()
    assert verdicts() == 1
    for _ in range(5):
        trace.step()
    assert verdicts() == 2
    trace.finding()
    assert verdicts() == 3


def test_the_verdict_is_no_older_than_a_mark_beside_it(trace: TraceBuilder) -> None:
    for _ in range(19):
        trace.step()
    assert run_results.diagnosis_of(now(trace)).verdict is Verdict.HEALTHY
    trace.step(loss=math.nan)  # whose replay takes a while: there is no incident yet
    run = now(trace)
    assert run_results.overview_of(run, None).loss.nonfinite == (20,)
    assert run_results.diagnosis_of(run).verdict is Verdict.PROBLEM


def test_the_verdict_on_a_finished_run_is_made_of_all_of_it(trace: TraceBuilder, computed: list[str]) -> None:
    run_results.diagnosis_of(now(trace))
    run_results.diagnosis_of(take_snapshot(trace.close()))
    run_results.diagnosis_of(take_snapshot(trace.folder))
    assert computed.count("diagnose") == 2


def test_a_step_is_read_once_whatever_is_added_to_the_run(trace: TraceBuilder, computed: list[str]) -> None:
    for _ in range(2):
        run = now(trace)
        step_results.recording_of(run, step_results.traced_steps_of(run)[-1])
        trace.step(traced="live")
        trace.op(0, step=1, source="live")
    assert computed == ["traced_steps", "recording", "traced_steps"]


def test_another_run_in_the_same_folder_is_another_run(tmp_path: Path, computed: list[str]) -> None:
    for created in (START, START + 1):
        trace = TraceBuilder(tmp_path / "run", created=created)
        trace.step()
        assert run_results.overview_of(take_snapshot(trace.close()), None).steps == 1
        shutil.rmtree(trace.folder)
    assert computed == ["overview"] * 2


def test_what_was_recorded_is_named_once_for_all_nodes(trace: TraceBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[RunSnapshot] = []
    known = run_results.measured_of

    def counted(run: RunSnapshot) -> MeasuredRun:
        measured.append(run)
        return known(run)

    monkeypatch.setattr(run_results, "measured_of", counted)
    run = take_snapshot(trace.close())
    (place,) = (each.place for each in known(run).places)
    facts = {name: getattr(place, name) for name in ("op", "name", "module", "phase", "dtype", "source")}
    node = PathNode(seq=0, shape="", min=None, max=None, **facts)
    for _ in range(2):
        key_of = recorded_place_of(run)
        assert [key_of(node), key_of(node), key_of(replace(node, op="another"))] == [place.key, place.key, None]
    assert len(measured) == 1
