"""What a gate lets through, on real runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.diagnosis.gate import Gate, Limit, LimitCheck, Outcome, gate, headrooms, new_overflows
from ampscope.analysis.diagnosis.gate_limits import Limits
from ampscope.analysis.precision.ranges.ranges import RangeRow
from ampscope.analysis.results import SourceLine
from ampscope.trace.read.run import open_run
from ampscope.trace.vocabulary import Verdict
from tests.support.paths import SAMPLES
from tests.support.trace_builder import TraceBuilder

BROKEN, HEALTHY = SAMPLES / "attention-overflow", SAMPLES / "healthy"
ALL = Limits(max_skipped=0.01, no_new_overflow=True, min_headroom=2.0)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _gate(opened: ExitStack, run: Path, limits: Limits, baseline: Path | None = None) -> Gate:
    held = opened.enter_context(open_run(baseline)) if baseline is not None else None
    return gate(opened.enter_context(open_run(run)), limits, held)


def _check(found: Gate, limit: Limit) -> LimitCheck:
    return next(check for check in found.checks if check.limit is limit)


def test_a_healthy_run_keeps_all_limits(opened: ExitStack) -> None:
    found = _gate(opened, HEALTHY, ALL)
    assert found.outcome is Outcome.PASSED
    assert [check.limit for check in found.checks] == list(Limit)


def test_only_what_is_asked_is_checked_beside_the_verdict(opened: ExitStack) -> None:
    found = _gate(opened, HEALTHY, Limits())
    assert [check.limit for check in found.checks] == [Limit.VERDICT]


def test_a_problem_fails_whatever_is_asked(opened: ExitStack) -> None:
    found = _gate(opened, BROKEN, Limits())
    assert found.outcome is Outcome.FAILED
    assert found.checks[0].op == "aten.bmm.default"


def test_headroom_below_the_limit_fails_and_names_the_place(opened: ExitStack) -> None:
    measured = _check(_gate(opened, HEALTHY, ALL), Limit.MIN_HEADROOM).measured
    assert measured is not None
    check = _check(_gate(opened, HEALTHY, Limits(min_headroom=measured + 0.5)), Limit.MIN_HEADROOM)
    assert (check.outcome, check.source is not None) == (Outcome.FAILED, True)
    assert "factors of two below overflow" in check.text


def test_an_overflow_that_the_baseline_has_is_not_new(opened: ExitStack) -> None:
    limits = Limits(no_new_overflow=True)
    against_itself = _check(_gate(opened, BROKEN, limits, BROKEN), Limit.NO_NEW_OVERFLOW)
    against_healthy = _check(_gate(opened, BROKEN, limits, HEALTHY), Limit.NO_NEW_OVERFLOW)
    assert (against_itself.outcome, against_itself.measured, against_itself.baseline) == (Outcome.PASSED, 0, 1)
    assert (against_healthy.outcome, against_healthy.measured) == (Outcome.FAILED, 1)
    assert "bmm in module blocks.0.attention" in against_healthy.text


def test_steps_lost_while_the_scale_finds_its_place_do_not_count(tmp_path: Path, opened: ExitStack) -> None:
    run = TraceBuilder(tmp_path)
    for step, skipped in enumerate([True] * 3 + [False] * 40 + [True] + [False] * 6):
        run.step(step=step, found_inf=skipped, skipped=skipped, scale=2.0 ** (13 if step < 3 else 10))
    check = _check(_gate(opened, run.close(), Limits(max_skipped=0.01)), Limit.MAX_SKIPPED)
    assert check.text.startswith("1 of 50 steps")
    assert check.outcome is Outcome.FAILED


def test_what_was_not_measured_is_not_passed(tmp_path: Path, opened: ExitStack) -> None:
    run = TraceBuilder(tmp_path)
    for step in range(20):
        run.step(step=step)
    found = _gate(opened, run.close(), ALL)
    assert found.diagnosis.verdict is not Verdict.PROBLEM
    assert _check(found, Limit.NO_NEW_OVERFLOW).outcome is Outcome.NOT_KNOWN
    assert _check(found, Limit.MIN_HEADROOM).outcome is Outcome.NOT_KNOWN
    assert found.outcome is Outcome.NOT_KNOWN


def _row(row: RangeRow, line: int, code: str) -> RangeRow:
    source = SourceLine(file="train.py", line=line, function="forward", code=code)
    return replace(row, source=source, key=f"{line}")


def test_a_place_is_known_though_its_line_has_moved(opened: ExitStack) -> None:
    [row] = headrooms(opened.enter_context(open_run(BROKEN))).overflowed
    before = [_row(row, 40, "a = q @ k")]
    assert list(new_overflows([_row(row, 47, "a = q @ k")], before)) == []
    [new] = new_overflows([_row(row, 47, "b = q @ v"), _row(row, 48, "a = q @ k")], before)
    assert new.key == "47"
