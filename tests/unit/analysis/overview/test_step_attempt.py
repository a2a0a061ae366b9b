from __future__ import annotations

from pathlib import Path

from ampscope import open_run
from ampscope.analysis.overview.search import attempt
from tests.support.trace_builder import TraceBuilder


def test_an_attempt_is_told_with_the_scale_after_it(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    trace.step(scale=64.0, skipped=True, traced="replay")
    trace.step(scale=32.0)
    trace.step(optimizer=1, scale=8.0)
    run = open_run(trace.close())
    first = attempt(run, 0)
    assert first is not None
    assert (first.scale, first.next_scale, first.skipped) == (64.0, 32.0, True)
    assert first.traced is not None
    assert (first.traced.step, first.traced.source) == (0, "replay")
    last = attempt(run, 1)
    assert last is not None
    assert (last.next_scale, last.traced) == (None, None)
    other = attempt(run, 0, optimizer=1)
    assert other is not None
    assert other.scale == 8.0


def test_a_step_that_never_was_is_none(tmp_path: Path) -> None:
    run = open_run(TraceBuilder(tmp_path / "run").close())
    assert attempt(run, 3) is None
