"""What the other pages of a finished run ask for is there before they do, and nothing of a run being written."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from queue import Queue

import pytest
import streamlit as st

from ampscope.errors import RunDamaged
from data import ahead, run_results
from data.run_snapshot import RunSnapshot, take_snapshot
from server_settings import collect_seldom, set_aside
from tests.support.page_reading import Shown
from tests.support.paths import SAMPLES
from tests.support.trace_builder import TraceBuilder

#: What pages wait for longest.
SLOW = (
    *("measured_places", "place_detail", "place_details", "closeup", "last_good"),
    *("scale_answer", "precision_over_steps", "plan"),
)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result, and no wish of a page that another test has drawn."""
    st.cache_resource.clear()
    monkeypatch.setattr(ahead, "_wanted", Queue(maxsize=1))


@pytest.fixture
def failed() -> RunSnapshot:
    """A run whose attention overflowed, as it is shipped."""
    return take_snapshot(SAMPLES / "attention-overflow")


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on each analysis that takes long fails."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    for name in SLOW:
        monkeypatch.setattr(run_results, name, fail)


def test_what_the_pages_ask_for_is_there(failed: RunSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ahead._work_out(failed)
    refuse(monkeypatch)
    for name in ahead.RESULTS:  # of another run each would fail
        with pytest.raises(AssertionError, match="again"):
            ahead.worked_out(take_snapshot(SAMPLES / "log-zero"), name)
    monkeypatch.setenv("AMPSCOPE_RUNS", str(SAMPLES))
    for page in ("ranges", "incident", "scale", "precision", "plan"):
        assert "cannot be shown" not in Shown.of(page, {"run": "attention-overflow"}).words


def test_another_visit_goes_before(failed: RunSnapshot) -> None:
    ahead.look_ahead(failed)
    assert not ahead._work_out(failed)


def test_of_several_the_newest_is_wanted(failed: RunSnapshot) -> None:
    newest = take_snapshot(SAMPLES / "healthy")
    ahead.look_ahead(failed)
    ahead.look_ahead(newest)
    assert ahead._wanted.get_nowait() == newest
    assert ahead._wanted.empty()


def test_a_run_being_written_keeps_its_processor(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    ahead.look_ahead(take_snapshot(trace.leave_open()))
    assert ahead._wanted.empty()
    trace.close()


@pytest.mark.parametrize("error", [RunDamaged("torn"), FileNotFoundError("deleted")])
def test_a_page_says_itself_what_cannot_be_read(
    failed: RunSnapshot, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def damaged(_: RunSnapshot) -> None:
        raise error

    monkeypatch.setitem(ahead.RESULTS, "Ranges", damaged)
    assert ahead._work_out(failed)


def test_nothing_is_said_of_pages_that_nobody_has_asked_for(
    failed: RunSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert ahead._work_out(failed)
    assert caplog.records == []


def test_what_is_set_aside_is_not_looked_at_until_the_next_time() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold()[0] > before[0]
        set_aside()
        held = gc.get_freeze_count()
        assert held > 0
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        set_aside()
        assert gc.collect() == 0  # the cycle is gone though it was made after the first time
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
