"""Which skipped steps are a loss scale at work and which are a failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ampscope.analysis.scale.scaler_course import LONGEST_CALIBRATION, SkipRun, Skips
from ampscope.analysis.tables.step_history import History
from ampscope.trace.vocabulary import Cause

#: A step of a run: the loss scale, and whether it was skipped.
Attempt = tuple[float, bool]


def history(attempts: Sequence[Attempt], first: int = 0) -> History:
    count = len(attempts)
    return History(
        optimizer=0,
        step=np.arange(first, first + count),
        loss=np.ones(count),
        has_loss=np.ones(count, dtype=np.bool_),
        scale=np.array([scale for scale, _ in attempts], dtype=np.float64),
        skipped=np.array([skipped for _, skipped in attempts], dtype=np.bool_),
        grad_norm=np.ones(count),
        lr=np.ones(count),
        thinned=np.zeros(count, dtype=np.bool_),
    )


def falling(start: float, count: int) -> list[Attempt]:
    """Skipped steps, each at half the scale of the one before."""
    return [(start / 2**i, True) for i in range(count)]


def good(scale: float, count: int) -> list[Attempt]:
    return [(scale, False)] * count


def skip_runs(attempts: History) -> list[SkipRun]:
    skips = Skips(attempts)
    return [skips.run(number) for number in range(len(skips))]


def the_run(attempts: Sequence[Attempt]) -> SkipRun:
    (run,) = skip_runs(history(attempts))
    return run


@pytest.mark.parametrize("attempts", [[], good(1024.0, 5)])
def test_without_a_skip_there_is_no_run_of_skips(attempts: Sequence[Attempt]) -> None:
    assert skip_runs(history(attempts)) == []


def test_the_first_steps_calibrate_the_scale() -> None:
    run = the_run([*falling(65536.0, 4), *good(4096.0, 50)])
    assert (run.position, run.first, run.last, run.count, run.lowest_scale) == (0, 0, 3, 4, 8192.0)
    assert run.recovered
    assert not run.had_trained
    assert run.calibrates
    assert run.benign_cause is Cause.BENIGN_INITIAL_CALIBRATION


def test_a_skip_soon_after_the_start_still_belongs_to_calibration() -> None:
    runs = skip_runs(history([*falling(65536.0, 2), *good(16384.0, 10), (16384.0, True), *good(8192.0, 9)]))
    assert [run.benign_cause for run in runs] == [Cause.BENIGN_INITIAL_CALIBRATION] * 2


def test_a_scale_that_grew_too_far_is_probing() -> None:
    attempts = [*good(1024.0, 200), *good(2048.0, 3), (2048.0, True), *good(1024.0, 200), (2048.0, True)]
    first, second = skip_runs(history(attempts))
    assert (first.first, first.count) == (203, 1)
    assert first.calibrates
    assert second.calibrates
    assert first.benign_cause is second.benign_cause is Cause.BENIGN_PERIODIC_GROWTH
    assert not second.recovered


def test_a_scale_that_falls_late_without_having_grown_adjusts() -> None:
    run = the_run([*good(1024.0, 300), (1024.0, True), *good(512.0, 10)])
    assert run.calibrates
    assert run.benign_cause is Cause.BENIGN_SCALE_ADJUSTMENT


def test_growth_before_the_skip_before_is_not_growth_since() -> None:
    attempts = [*good(1024.0, 100), *good(2048.0, 100), (2048.0, True), *good(1024.0, 50), (1024.0, True)]
    first, second = skip_runs(history(attempts))
    assert first.benign_cause is Cause.BENIGN_PERIODIC_GROWTH
    assert second.benign_cause is Cause.BENIGN_SCALE_ADJUSTMENT


def test_a_scale_below_one_is_a_collapse() -> None:
    assert the_run([*falling(8.0, 4), *good(0.5, 1)]).calibrates
    assert not the_run([*falling(8.0, 5), *good(0.25, 1)]).calibrates


def test_a_long_row_of_skips_is_a_collapse_whatever_the_scale() -> None:
    start = 2.0**40
    assert the_run(falling(start, LONGEST_CALIBRATION)).calibrates
    assert not the_run(falling(start, LONGEST_CALIBRATION + 1)).calibrates


def test_a_short_row_of_skips_at_the_end_has_not_recovered_yet() -> None:
    run = the_run([*good(1024.0, 100), *falling(1024.0, 3)])
    assert not run.recovered
    assert run.had_trained
    assert run.calibrates


def test_a_skip_without_a_known_scale_is_no_collapse() -> None:
    run = the_run([(float("nan"), True), (1.0, False)])
    assert run.lowest_scale == 1.0
    assert run.calibrates


def test_steps_are_told_by_number_and_not_by_position() -> None:
    (run,) = skip_runs(history([*good(8.0, 2), *falling(8.0, 2), *good(2.0, 1)], first=100))
    assert (run.position, run.first, run.last, run.count) == (2, 102, 103, 2)


def test_a_run_is_found_by_any_of_its_steps() -> None:
    attempts = [*good(8.0, 2), *falling(8.0, 2), *good(2.0, 3), (2.0, True), (1.0, False)]
    skips = Skips(history(attempts, first=100))
    found = [None if (run := skips.of_step(step)) is None else (run.first, run.last) for step in range(98, 111)]
    first, second = (102, 103), (107, 107)
    assert found == [None] * 4 + [first] * 2 + [None] * 3 + [second] + [None] * 3


# -- calibration is harmless because it ends --------------------------------------------------------------------------


def falling_by_turns(start: float, count: int, between: int = 1) -> list[Attempt]:
    """Skips with good steps in between, each at half the scale of the one before."""
    return [step for i in range(count) for step in ((start / 2**i, True), *good(start / 2 ** (i + 1), between))]


def all_calibrate(attempts: Sequence[Attempt]) -> set[bool]:
    return {run.calibrates for run in skip_runs(history(attempts))}


def test_skips_that_go_on_below_one_are_no_calibration_from_the_first() -> None:
    assert all_calibrate(falling_by_turns(64.0, 9)) == {False}  # 64 to 2^-3, half of the steps


def test_skips_by_turns_that_never_end_are_no_calibration() -> None:
    assert all_calibrate(falling_by_turns(2.0**24, 16)) == {False}


def test_a_long_calibration_that_ends_is_one() -> None:
    assert all_calibrate([*falling(2.0**32, 24), *good(2.0**8, 60)]) == {True}
    assert all_calibrate([*falling_by_turns(2.0**24, 16), *good(2.0**8, 60)]) == {True}


def test_what_comes_after_a_scale_has_held_is_another_story() -> None:
    first, *later = skip_runs(history([*falling(65536.0, 4), *good(4096.0, 50), *falling(4096.0, 15)]))
    assert first.calibrates
    assert [run.calibrates for run in later] == [False]


def test_growth_that_is_taken_back_each_time_is_no_failure() -> None:
    attempts = [step for _ in range(6) for step in (*good(1024.0, 25), (2048.0, True))]
    assert all_calibrate(attempts) == {True}


@pytest.mark.parametrize(("since", "probing"), [(1, True), (500, False)])
def test_a_skip_long_after_a_growth_is_no_probe(since: int, probing: bool) -> None:
    run = the_run([*good(1024.0, 100), *good(2048.0, since), (2048.0, True), *good(1024.0, 9)])
    assert run.benign_cause is (Cause.BENIGN_PERIODIC_GROWTH if probing else Cause.BENIGN_SCALE_ADJUSTMENT)


@pytest.mark.parametrize("bad", [False, True])
def test_steps_whose_loss_is_not_finite_say_nothing_of_a_calibration_before(*, bad: bool) -> None:
    attempts = history([*good(65536.0, 1), *falling(65536.0, 1), *good(32768.0, 8), *falling(32768.0, 30)])
    attempts.loss[10:] = np.nan if bad else 1.0
    first, last = skip_runs(attempts)
    assert (first.calibrates, last.calibrates) == (bad, False)
