from __future__ import annotations

import math
from pathlib import Path

from ampscope import open_run
from ampscope.analysis.overview.run_list import QUIET_S, QUIET_STEPS, Pulse, pulse
from tests.support.trace_builder import START, TraceBuilder


def test_the_newest_step_and_what_went_wrong(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for step in range(5):
        trace.step(step=step, duration_s=0.5, traced="live" if step < 3 else "")
    trace.incident(step=3)
    trace.finding(step=1)
    with open_run(trace.leave_open()) as run:
        seen = pulse(run)
        assert (seen.status, seen.steps, seen.last_step, seen.last_time) == ("open", 5, 4, START + 4)
        assert (seen.incidents, seen.last_incident, seen.findings, seen.last_finding) == (1, 3, 1, 1)
        assert seen.step_seconds == 0.5
        assert seen.last_traced == 2
        trace.close()
        assert pulse(run).status == "closed"


def test_steps_with_nan_or_infinity_are_counted(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for loss, norm in (
        (1.0, 1.0),
        (math.nan, 1.0),
        (1.0, math.inf),
        (math.nan, math.nan),
        (None, None),
        (None, -math.inf),
    ):
        trace.step(loss=loss, grad_norm=norm)
    with open_run(trace.close()) as run:
        assert pulse(run).nonfinite == 4


def test_before_the_first_step_there_is_no_silence(tmp_path: Path) -> None:
    with open_run(TraceBuilder(tmp_path).close()) as run:
        seen = pulse(run)
    assert seen.last_traced is None
    assert seen.silence(START) is None
    assert not seen.is_overdue(START + 1e6)


def test_a_silence_is_long_against_the_steps_before_it() -> None:
    quick = Pulse(status="open", last_time=START, step_seconds=0.1)
    assert not quick.is_overdue(START + QUIET_S)
    assert quick.is_overdue(START + QUIET_S + 1)
    slow = Pulse(status="open", last_time=START, step_seconds=30.0)
    assert not slow.is_overdue(START + 30 * QUIET_STEPS)
    assert slow.is_overdue(START + 30 * QUIET_STEPS + 1)
    assert quick.silence(START - 5) == 0  # clocks differ
