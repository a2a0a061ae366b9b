"""Runs of which a part was not recorded are not healthy, and say what is missing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ampscope
from ampscope.analysis.diagnosis.gate import Outcome, gate
from ampscope.analysis.diagnosis.gate_limits import Limits
from ampscope.trace.files import recording_end
from ampscope.trace.files.journal import Journal
from ampscope.trace.files.recording_end import recording_ends
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import EventKind
from ampscope.trace.vocabulary import Verdict
from tests.support.trace_builder import TraceBuilder

STEPS = 20


def _verdict(run: Path) -> Verdict:
    with open_run(run) as opened:
        assert gate(opened, Limits()).outcome is {
            Verdict.HEALTHY: Outcome.PASSED,
            Verdict.NOT_OBSERVED: Outcome.NOT_KNOWN,
        }.get(ampscope.diagnose(run).verdict, Outcome.FAILED)
    return ampscope.diagnose(run).verdict


def _rank(run: Path, rank: int, steps: int, world: int = 2) -> TraceBuilder:
    built = TraceBuilder(run, rank=rank, world_size=world)
    built.event(EventKind.START)
    for step in range(steps):
        built.step(step=step, grad_norm=1.0 + step)
    return built


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_recorded_nothing_agrees_with_none(run_folder: Path, silent: int) -> None:
    for rank in (0, 1):
        _rank(run_folder, rank, 0 if rank == silent else STEPS).close()
    told = ampscope.diagnose(run_folder)
    assert _verdict(run_folder) is Verdict.NOT_OBSERVED
    assert f"Rank {silent} recorded no step, so nothing was compared" in told.summary
    assert f"Rank {silent} recorded no step; nothing was compared." in told.ranks
    assert not any("agree" in each for each in told.ranks)


def test_the_others_are_compared(run_folder: Path) -> None:
    for rank in range(3):
        _rank(run_folder, rank, STEPS if rank else 0, world=3).close()
    told = ampscope.diagnose(run_folder)
    assert told.verdict is Verdict.NOT_OBSERVED
    assert told.summary.startswith("Rank 0 recorded no step: ")
    assert "2 ranks are replicas: gradient norm, loss scale and skips agree at every step." in told.ranks


def test_ranks_that_all_recorded_are_healthy(run_folder: Path) -> None:
    for rank in (0, 1):
        _rank(run_folder, rank, STEPS).close()
    assert _verdict(run_folder) is Verdict.HEALTHY


def test_ranks_that_were_not_watched_are_the_users_choice(run_folder: Path) -> None:
    _rank(run_folder, 0, STEPS).close()
    assert _verdict(run_folder) is Verdict.HEALTHY


def _fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no room for a byte more; what is there can be written over."""

    def full(self: Journal, message: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "_write", full)


def _trained(run: Path, comes: Callable[[], object]) -> Path:
    built = _rank(run, 0, STEPS, world=1)
    built.leave_open()
    comes()
    built.step(step=STEPS)
    return built.close()


def test_a_full_disk_is_told_and_is_not_healthy(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _trained(run_folder, lambda: _fill(monkeypatch))
    told = ampscope.diagnose(run)
    assert _verdict(run) is Verdict.NOT_OBSERVED
    assert told.summary.startswith(f"Recording ended after step {STEPS - 1}, at ")
    assert "No space left on device" in told.summary


def test_a_disk_with_room_leaves_nothing(run_folder: Path) -> None:
    run = _trained(run_folder, lambda: None)
    assert _verdict(run) is Verdict.HEALTHY
    assert not (run / "rank=0" / recording_end.NAME).exists()


def test_a_run_that_goes_on_tells_of_the_end_before(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        run = _trained(run_folder, lambda: _fill(full))
    _rank(run, 0, STEPS, world=1).close()
    assert "Recording ended in an earlier part of the run" in ampscope.diagnose(run).summary


@pytest.mark.skipif(os.name == "nt", reason="folders have no such mode there")
def test_the_note_needs_no_new_file(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    def comes() -> None:
        _fill(monkeypatch)
        monkeypatch.setattr(os, "open", refused)

    built = _rank(run_folder, 0, STEPS, world=1)
    built.leave_open()
    comes()
    built.step(step=STEPS)
    built.close()
    monkeypatch.undo()
    assert [end.why for end in recording_ends(run_folder / "rank=0")] == ["OSError: [Errno 28] No space left on device"]
