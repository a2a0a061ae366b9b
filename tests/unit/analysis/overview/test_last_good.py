"""The last good step and what has moved since, on traces written row by row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope.analysis.overview.last_good_step import MOST_TOLD, last_good
from ampscope.analysis.overview.unusual_moves import FIRST, UNUSUAL, how_unusual
from ampscope.analysis.results import Incident, LastGood, MoveKind
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Phase, ReplayStatus, Source, Trigger
from ampscope.trace.vocabulary import Cause, Severity
from tests.support.trace_builder import TraceBuilder

BAD = 40


def incident(**columns: Any) -> Incident:
    told: dict[str, Any] = {
        "step": BAD,
        "last_step": BAD,
        "severity": Severity.ERROR,
        "cause": Cause.FP16_OVERFLOW,
        "phase": "forward",
        "trigger": Trigger.NONFINITE_LOSS,
    }
    return Incident(**{**told, **columns})


def found(folder: Path, **columns: Any) -> LastGood:
    with open_run(folder) as run:
        told = last_good(run, incident(**columns))
    assert told is not None
    return told


def steps(trace: TraceBuilder, **late: Any) -> None:
    """Calm steps with some noise, then one that fails; ``late`` are columns of the failing one."""
    for step in range(BAD):
        trace.step(loss=2.0 + 0.1 * (step % 3), grad_norm=1.0 + 0.2 * (step % 2))
    trace.step(**{"loss": float("nan"), "grad_norm": None, "skipped": True, "found_inf": True, **late})
    trace.incident(step=BAD, trigger=Trigger.NONFINITE_LOSS)


def test_a_step_that_was_skipped_or_had_an_incident_is_not_good(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    for step in range(BAD + 1):
        trace.step(skipped=step == BAD - 1, loss=float("nan") if step == BAD else 2.0)
    trace.incident(step=BAD - 2)
    trace.incident(step=BAD)
    assert found(trace.close()).step == BAD - 3


def test_a_good_step_with_a_loss_far_above_the_others_is_not_calm(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    for step in range(BAD + 1):
        trace.step(loss=float("nan") if step == BAD else 2.0 + 0.1 * (step % 3) + 50.0 * (step >= BAD - 2))
    told = found(trace.close())
    assert (told.step, told.calm_step) == (BAD - 1, BAD - 3)
    assert told.moves[0].kind is MoveKind.LOSS
    assert f"stood out after step {BAD - 3}" in told.summary


def test_a_loss_that_stays_on_another_level_is_calm_again(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    for step in range(BAD + 1):
        trace.step(loss=float("nan") if step == BAD else 200.0 if step > 10 else 2.0)
    assert found(trace.close()).calm_step == BAD - 1


def test_a_rate_that_moves_with_each_step_is_left_out(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    for step in range(BAD + 1):
        trace.step(loss=float("nan") if step == BAD else 2.0, lr=1e-3 * 0.99**step)
    told = found(trace.close())
    assert told.moves == ()
    assert "nothing of what the steps record moved" in told.summary


def grouped(trace: TraceBuilder, rates: Callable[[int], tuple[float, float]], *, names: tuple[str, str]) -> None:
    """Steps with two parameter groups, the last of which fails."""
    for step in range(BAD + 1):
        first, second = rates(step)
        lrs = json.dumps(dict(zip(names, (first, second), strict=True))) if first != second else None
        trace.step(loss=math.nan if step == BAD else 2.0, lr=first, lrs=lrs)


@pytest.mark.parametrize(
    ("names", "name", "told_as"),
    [(("0", "1"), "1", "1 (counted from 0)"), (("0 body", "1 head"), "head", "head")],
    ids=["number", "name"],
)
def test_a_further_groups_rate_that_jumps_is_told_first(
    names: tuple[str, str], name: str, told_as: str, tmp_path: Path
) -> None:
    trace = TraceBuilder(tmp_path / "run")
    grouped(trace, lambda step: (1e-3, 1e-3 if step < BAD - 1 else 0.5), names=names)
    move = found(trace.close()).moves[0]
    assert (move.kind, move.name, move.before, move.after) == (MoveKind.LEARNING_RATE, name, 1e-3, 0.5)
    assert (move.step, move.score) == (BAD - 1, FIRST)
    assert move.text.startswith(
        f"the learning rate of parameter group {told_as} went from 0.001 to 0.5 at step {BAD - 1}"
    )


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param(lambda step: (1e-3, 1e-2), id="its own, and steady"),
        pytest.param(lambda step: (1e-3 * 0.99**step, 1e-2 * 0.99**step), id="a schedule"),
    ],
)
def test_a_further_groups_rate_that_is_as_it_was_is_not_told(
    rates: Callable[[int], tuple[float, float]], tmp_path: Path
) -> None:
    trace = TraceBuilder(tmp_path / "run")
    grouped(trace, rates, names=("0", "1"))
    assert found(trace.close()).moves == ()


def test_a_rate_that_moves_in_all_groups_alike_is_told_once(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    grouped(trace, lambda step: (1e-3, 1e-2) if step < BAD - 1 else (0.5, 5.0), names=("0", "1"))
    (move,) = found(trace.close()).moves
    assert (move.name, move.after) == ("", 0.5)


def test_what_always_moves_as_far_ranks_behind_what_does_not(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    for step in range(BAD):
        trace.step(lr=1e-3 * 2.0 ** (step % 2), scale=256.0)
    trace.step(loss=float("nan"), lr=2e-3, scale=2.0**20)
    told = found(trace.close())
    assert [(move.kind, move.score) for move in told.moves] == [
        (MoveKind.SCALE, FIRST),
        (MoveKind.LEARNING_RATE, pytest.approx(1.0)),
    ]
    assert "as in the steps before" in told.moves[1].text
    assert "learning rate" not in told.summary
    assert "the same in 40 good steps before" in told.moves[0].text


def test_a_scale_that_its_scaler_lowers_is_no_cause(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace, scale=16.0)
    (move,) = found(trace.close()).moves
    assert move.score is not None
    assert move.score < UNUSUAL
    assert "as GradScaler lowers it" in move.text


def values(trace: TraceBuilder, *, times: float, scale: float = 65536.0, every: int = 8) -> None:
    """An input, an op that follows it and its gradient, recorded every so often and in the replay."""
    sites = {
        "x": trace.site("input", name="x", module="", file="", out_dtypes=("float32",), out_shapes=("4x8",)),
        "mm": trace.site("aten.mm.default"),
        "back": trace.site("aten.mm.default", phase=Phase.BACKWARD, line=11),
    }
    for number, step in enumerate([*range(0, BAD, every), BAD]):
        source = Source.REPLAY if step == BAD else Source.LIVE
        noise, factor = 1.0 + 0.2 * (number % 2), times if step == BAD else 1.0
        scaled = scale if step == BAD else 65536.0
        for name, size in (("x", 3.0), ("mm", 9.0), ("back", 0.5 * scaled)):
            largest = size * noise * factor
            trace.op(sites[name], step=step, source=source, min=-largest, max=largest, zeros=None)


def test_an_input_out_of_all_proportion_comes_before_what_follows_from_it(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace)
    values(trace, times=1000.0)
    told = found(trace.close())
    assert told.sampled_step == 32
    assert [(move.kind, move.name or move.op) for move in told.moves[:2]] == [
        (MoveKind.BATCH, "x"),
        (MoveKind.RANGE, "aten.mm.default"),
    ]
    assert told.moves[0].before == pytest.approx(3.0)
    assert told.moves[0].after == pytest.approx(3600.0, rel=1e-3)
    assert all(move.score is not None and move.score <= (told.moves[0].score or 0) for move in told.moves[1:])


def spoilt_input(trace: TraceBuilder, *, usual: float, bad: float, recorded: int = 5, size: float = 9.0) -> None:
    """An input that is ``bad`` in the failing step and ``usual`` before, and the result of an op."""
    x = trace.site("input", name="x", module="", file="", out_dtypes=("float32",), out_shapes=("4x8",))
    mm = trace.site("aten.mm.default")
    for step in [*range(BAD - recorded, BAD), BAD]:
        source, largest = (Source.REPLAY, bad) if step == BAD else (Source.LIVE, usual)
        trace.op(x, step=step, source=source, min=-3.0 if largest > 0 else largest, max=largest, zeros=None)
        result = size if step == BAD else 9.0
        trace.op(mm, step=step, source=source, min=-result, max=result, zeros=None)


@pytest.mark.parametrize(
    ("bad", "word"), [pytest.param(math.nan, "NaN", id="NaN"), pytest.param(math.inf, "infinities", id="infinite")]
)
def test_an_input_that_is_not_finite_any_more_moved_as_far_as_can_be(bad: float, word: str, tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace)
    spoilt_input(trace, usual=3.0, bad=bad)
    told = found(trace.close())
    assert [(move.kind, move.name, move.before, move.score) for move in told.moves] == [
        (MoveKind.BATCH, "x", 3.0, FIRST)
    ]
    assert repr(told.moves[0].after) == repr(bad)
    assert told.summary.endswith(f"Since then: input x holds {word} (3 at step 39), finite in 5 recorded steps before.")


def test_an_input_that_was_infinite_before_too_has_not_moved(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace)
    spoilt_input(trace, usual=-math.inf, bad=-math.inf)
    told = found(trace.close())
    assert told.moves == ()
    assert told.summary.endswith("Since then nothing moved.")


def test_what_moved_less_than_is_told_is_not_said_to_have_stood_still(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace)
    spoilt_input(trace, usual=3.0, bad=3.0, size=12.0)
    told = found(trace.close())
    assert told.moves == ()
    assert told.summary.endswith("Since then nothing moved by a factor of two.")


@pytest.mark.parametrize(
    ("usual", "words"),
    [
        pytest.param(3.0, "nothing that stayed finite moved.", id="finite before"),
        pytest.param(math.nan, "no values of ops are finite in both.", id="never finite"),
    ],
)
def test_results_that_are_not_finite_are_not_said_to_have_stood_still(usual: float, words: str, tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace)
    x = trace.site("input", name="x", module="", file="", out_dtypes=("float32",), out_shapes=("4x8",))
    mm = trace.site("aten.mm.default")
    for step in [*range(BAD - 5, BAD), BAD]:
        source, result = (Source.REPLAY, math.nan) if step == BAD else (Source.LIVE, usual)
        trace.op(x, step=step, source=source, min=-usual, max=usual, zeros=None)
        trace.op(mm, step=step, source=source, min=result, max=result, zeros=None)
    told = found(trace.close())
    assert told.moves == ()
    assert told.summary.endswith(words)


def test_gradients_are_compared_without_the_loss_scale(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace, scale=2.0**30)
    values(trace, times=1.0, scale=2.0**30)
    assert [move.kind for move in found(trace.close()).moves] == [MoveKind.SCALE]


def test_values_that_were_recorded_once_are_told_behind(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace, scale=2.0**30)
    values(trace, times=1000.0, scale=2.0**30, every=100)
    told = found(trace.close())
    assert told.moves[0].kind is MoveKind.SCALE
    assert told.moves[1].score is None
    assert "with one earlier step to compare with" in told.moves[1].text


def test_a_replay_that_came_out_differently_is_not_compared(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace)
    trace.incident(step=BAD, trigger=Trigger.NONFINITE_LOSS, replay=ReplayStatus.DIVERGED)
    values(trace, times=1000.0)
    told = found(trace.close())
    assert (told.sampled_step, told.moves) == (None, ())


def test_a_resume_counts_less_with_each_good_step_since(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = TraceBuilder(folder, versions={"torch": "2.14.0"})
    for _ in range(BAD - 3):
        first.step()
    first.close()
    second = TraceBuilder(folder, versions={"torch": "2.15.0"})
    for step in range(BAD - 3, BAD + 1):
        second.step(loss=float("nan") if step == BAD else 2.0)
    told = found(second.close())
    assert [(move.kind, move.step, move.before, move.after) for move in told.moves] == [
        (MoveKind.SEGMENT, BAD - 3, "2.14.0", "2.15.0")
    ]
    assert told.moves[0].score == FIRST / 4


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"severity": Severity.INFO}, id="harmless"),
        pytest.param({"cause": Cause.TREND_OVERFLOW, "severity": Severity.WARNING}, id="ahead"),
        pytest.param({"trigger": Trigger.UPDATES_LOST}, id="not looked for at each step"),
    ],
)
def test_nothing_is_said_where_steps_before_may_have_been_the_same(columns: dict[str, Any], tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace)
    with open_run(trace.close()) as run:
        assert last_good(run, incident(**columns)) is None


def test_no_more_are_told_than_a_person_reads(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path / "run")
    steps(trace, scale=2.0**30, lr=1.0, loss=1e9, grad_norm=1e9)
    values(trace, times=1000.0)
    told = found(trace.close())
    assert len(told.moves) <= MOST_TOLD
    assert len(told.summary) < 300


def unusual(logs: list[float], move: float, *, until: int | None = None) -> float | None:
    at = np.arange(len(logs)) * 8
    return how_unusual(at, np.array(logs), move, int(at[-1]) + 8 if until is None else until).score


def test_a_trend_that_goes_on_is_as_before_however_far_it_has_come() -> None:
    assert unusual([0.0, 1.0, 2.0, 3.0, 4.0], 1.0) == pytest.approx(1.0)
    assert unusual([0.0, 1.0, 2.0, 3.0, 4.0], 100.0, until=32 + 800) == pytest.approx(1.0)
    assert unusual([0.0, 1.0, 0.0, 1.0, 0.0], 100.0, until=32 + 800) == pytest.approx(100.0)


def test_too_little_history_has_no_score_and_a_constant_the_highest() -> None:
    assert unusual([1.0, 1.0], 5.0) is None
    assert unusual([1.0, 1.0, 1.0], 5.0) == FIRST
