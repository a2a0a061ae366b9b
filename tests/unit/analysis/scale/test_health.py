"""Verdicts on loss scales whose histories follow ``GradScaler``'s own recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ampscope import diagnose
from ampscope.analysis.arrays import Columns
from ampscope.analysis.results import ScaleHealth, ScaleVerdict
from ampscope.analysis.scale.health import scale_health
from ampscope.analysis.scale.scaler_course import ScaleCourse, ScalerSettings
from ampscope.trace.schema import ReplayStatus, ScalerAction
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.trace_builder import TraceBuilder

STEADY, CALIBRATED, PROBING = ScaleVerdict.STEADY, ScaleVerdict.CALIBRATED, ScaleVerdict.PROBING
OSCILLATING, RUNAWAY = ScaleVerdict.OSCILLATING, ScaleVerdict.RUNAWAY
FLOORED, COLLAPSED = ScaleVerdict.FLOORED, ScaleVerdict.COLLAPSED
INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR

Overflows = Callable[[int, float], bool]


class Course(NamedTuple):
    """How a scaler was made, and at which attempts and scales its gradients overflow."""

    steps: int
    overflows: Overflows
    init: float = 65536.0
    interval: int = 2000
    floor: float = 0.0  #: below which the loop itself does not let the scale fall
    bad_loss: Callable[[int], bool] = lambda number: False  #: attempts whose loss is NaN, skipped at any scale


def attempts(course: Course) -> ScaleCourse:
    """The attempts of a scaler that doubles after ``interval`` good steps in a row and halves after each overflow."""
    scale, tracker, scales, skips = course.init, 0, [], []
    for number in range(course.steps):
        scales.append(scale)
        skips.append(course.bad_loss(number) or course.overflows(number, scale))
        tracker = 0 if skips[-1] else tracker + 1
        if skips[-1]:
            scale = max(float(np.float32(scale * 0.5)), course.floor)
        elif tracker == course.interval and math.isfinite(np.float32(scale * 2.0)):
            scale, tracker = scale * 2.0, 0
    bad = np.array([course.bad_loss(number) for number in range(course.steps)], dtype=bool)
    settings = ScalerSettings(init_scale=course.init, growth_interval=course.interval)
    return ScaleCourse(np.arange(course.steps), np.array(scales), np.array(skips), bad, settings)


def health(course: Course) -> ScaleHealth:
    found = scale_health(attempts(course))
    assert found is not None
    return found


def above(limit: float, *, since: int = 0) -> Overflows:
    return lambda number, scale: number >= since and scale > limit


def never(*_: object) -> bool:
    return False


def always_from(first: int) -> Overflows:
    return lambda number, _: number >= first


def noisy(spread: float) -> Overflows:
    sizes = np.random.default_rng(0).normal(0, spread, 10_000)
    return lambda number, scale: scale * 2.0 ** sizes[number] > 8192


COURSES: dict[str, tuple[Course, ScaleVerdict, Severity]] = {
    "nothing happens": (Course(300, never), STEADY, INFO),
    "calibration": (Course(300, above(4096.0)), CALIBRATED, INFO),
    "a long calibration": (Course(300, above(1.0)), CALIBRATED, INFO),
    "calibration not over yet": (Course(10, above(0.0)), CALIBRATED, INFO),
    "growth now and then": (Course(9000, above(4096.0), init=4096.0), PROBING, INFO),
    "larger gradients later on": (Course(2000, above(2048.0, since=900)), PROBING, INFO),
    "a short demonstration of growth": (Course(40, above(1024.0), init=1024.0, interval=8), PROBING, INFO),
    "a fall and a recovery": (Course(5000, lambda n, s: 99 < n < 125, interval=200), PROBING, INFO),
    "growth every four steps": (Course(600, above(4096.0), init=4096.0, interval=4), OSCILLATING, INFO),
    "growth every step": (Course(600, above(4096.0), init=4096.0, interval=1), OSCILLATING, WARNING),
    "gradients of all sizes": (Course(2000, noisy(4.0), interval=5), OSCILLATING, INFO),
    "growth without end": (Course(3000, never, interval=50), RUNAWAY, INFO),
    "a scale below one": (Course(400, above(2.0**-6)), FLOORED, WARNING),
    "a floor of the loop's own": (Course(400, always_from(100), floor=1.0), FLOORED, ERROR),
    "a fall to zero": (Course(400, always_from(100)), FLOORED, ERROR),
    "a collapse from the start": (Course(60, always_from(0)), COLLAPSED, ERROR),
    "a collapse later on": (Course(160, always_from(100)), COLLAPSED, ERROR),
}


@pytest.mark.parametrize("name", COURSES)
def test_verdicts(name: str) -> None:
    course, verdict, severity = COURSES[name]
    found = health(course)
    assert (found.verdict, found.severity) == (verdict, severity)
    assert found.verdict.is_calm == (verdict in (STEADY, CALIBRATED, PROBING))
    assert found.explanation


def test_numbers_are_those_of_the_history() -> None:
    found = health(Course(9000, above(4096.0)))
    assert (found.steps, found.skipped, found.calibrating, found.growths, found.backoffs) == (9000, 8, 4, 4, 8)
    assert (found.current, found.lowest, found.held) == (4096.0, 4096.0, 4096.0)
    assert found.lost_share == 8 / 9000
    assert found.remedies[0].code == "scaler = torch.amp.GradScaler(init_scale=4096.0)"


def test_the_stretch_of_a_collapse() -> None:
    found = health(COURSES["a collapse later on"][0])
    assert (found.first_step, found.last_step, found.skipped) == (100, 159, 60)


def test_oscillation_names_its_interval_or_the_gradients() -> None:
    probing = health(COURSES["growth every four steps"][0])
    assert "grows after 4 steps" in probing.explanation
    assert "growth_interval=2000" in probing.remedies[0].code
    noise = health(COURSES["gradients of all sizes"][0])
    assert "varies" in noise.explanation
    assert "batches" in noise.remedies[0].text


def every(period: int, *, since: int = 0) -> Callable[[int], bool]:
    return lambda number: number >= since and number % period == 0


def test_a_scale_that_non_finite_losses_brought_below_one_says_nothing_about_the_size_of_the_loss() -> None:
    found = health(Course(200, never, init=16.0, bad_loss=every(10, since=40)))
    assert (found.verdict, found.severity) == (FLOORED, WARNING)
    assert "In all 12 steps skipped at a scale of 1 or less the loss itself was NaN" in found.explanation
    assert "too large" not in found.explanation
    assert [remedy.code for remedy in found.remedies] == [""]


def test_a_scale_that_a_loop_holds_high_is_not_said_to_be_the_last_that_is_left() -> None:
    found = health(Course(60, above(4096.0), init=2.0**40, floor=2.0**40))
    assert (found.verdict, found.severity) == (FLOORED, ERROR)
    assert found.explanation == (
        "The scale stands at 1.1e12 (2⁴⁰) and does not fall, though the last 60 steps were all skipped."
    )


def test_a_loss_that_is_too_large_is_told_beside_one_that_is_not_finite() -> None:
    found = health(Course(200, above(2.0**-6), init=16.0, bad_loss=lambda number: number == 50))
    said = "at larger scales gradients were not finite. In 1 of the 7 steps skipped at a scale of 1"
    assert said in found.explanation
    assert found.remedies[0].code == "loss = loss / loss_weight"


@pytest.mark.parametrize(
    ("course", "verdict"),
    [
        (Course(160, never, bad_loss=lambda number: number >= 100), COLLAPSED),
        (Course(400, never, floor=1.0, bad_loss=lambda number: number >= 100), FLOORED),
        (Course(2000, never, interval=5, bad_loss=every(7)), OSCILLATING),
        (Course(9000, never, bad_loss=lambda number: number == 4500), PROBING),
    ],
)
def test_skips_of_non_finite_losses_are_told_with_every_verdict(course: Course, verdict: ScaleVerdict) -> None:
    found = health(course)
    assert found.verdict == verdict
    assert "no scale would have saved" in found.explanation
    told = " ".join(remedy.text + remedy.code for remedy in found.remedies)
    assert ("Cure the steps whose loss is not finite first" in told) == (verdict is not PROBING)
    assert "batches" not in told


def test_no_better_start_is_advised_where_no_scale_would_have_helped() -> None:
    assert health(Course(300, never, bad_loss=lambda number: number < 6)).remedies == ()


def test_no_incident_of_the_scale_comes_on_top_of_the_losses(run_folder: Path) -> None:
    diagnosis = diagnose(recorded(run_folder, Course(200, never, init=16.0, bad_loss=every(10, since=40))))
    assert diagnosis.scale[0].verdict is FLOORED
    assert Cause.SCALE_OVERFLOW not in {incident.cause for incident in diagnosis.incidents}


def test_no_scale_no_verdict() -> None:
    nothing, no = np.zeros(0), np.zeros(0, dtype=bool)
    assert scale_health(ScaleCourse(nothing.astype(np.int64), nothing, no, no)) is None
    unscaled = {"step": np.arange(3), "scale": np.full(3, np.nan), "skipped": np.zeros(3, bool), "loss": np.ones(3)}
    assert scale_health(ScaleCourse.of(Columns(unscaled))) is None


def recorded(folder: Path, course: Course, *, incidents: bool = False) -> Path:
    trace = TraceBuilder(folder)
    detail = f'{{"growth_interval": {course.interval}}}'
    trace.scaler_event(ScalerAction.INIT, scale_before=None, scale_after=course.init, detail=detail)
    made = attempts(course)
    scales, skips, bad_loss = made.scale, made.skipped, made.bad_loss
    for step, (scale, skipped) in enumerate(zip(scales, skips, strict=True)):
        loss = math.nan if bad_loss[step] else 0.003
        trace.step(scale=float(scale), skipped=bool(skipped), found_inf=bool(skipped), loss=loss)
        if skipped and incidents:
            trace.incident(step=step, scale=float(scale), replay=ReplayStatus.UNAVAILABLE, replay_reason="none left")
    return trace.close()


def test_a_collapse_that_nothing_else_explains_is_the_primary(run_folder: Path) -> None:
    diagnosis = diagnose(recorded(run_folder, COURSES["a collapse later on"][0]))
    assert diagnosis.verdict is Verdict.PROBLEM
    assert diagnosis.primary == diagnosis.incidents[0]
    assert (diagnosis.primary.cause, diagnosis.primary.step, diagnosis.primary.count) == (Cause.SCALE_OVERFLOW, 100, 60)
    assert diagnosis.scale[0].verdict is COLLAPSED


@pytest.mark.parametrize("name", ["calibration", "growth now and then", "growth every four steps"])
def test_how_a_scaler_works_is_no_problem(run_folder: Path, name: str) -> None:
    diagnosis = diagnose(recorded(run_folder, COURSES[name][0]))
    assert (diagnosis.verdict, diagnosis.primary, diagnosis.incidents) == (Verdict.HEALTHY, None, ())


def test_skips_that_could_not_be_replayed_are_harmless_where_a_smaller_scale_held(run_folder: Path) -> None:
    diagnosis = diagnose(recorded(run_folder, COURSES["calibration"][0], incidents=True))
    assert diagnosis.verdict is Verdict.HEALTHY
    (incident,) = diagnosis.incidents
    assert (incident.cause, incident.count) == (Cause.BENIGN_INITIAL_CALIBRATION, 4)


def test_skips_that_could_not_be_replayed_and_never_ended_are_not(run_folder: Path) -> None:
    diagnosis = diagnose(recorded(run_folder, COURSES["a collapse from the start"][0], incidents=True))
    assert diagnosis.verdict is Verdict.PROBLEM


@pytest.mark.parametrize(("init", "said"), [(16.0, "at larger scales gradients were not finite"), (0.5, "")])
def test_a_scale_below_one_is_explained_by_skips_at_larger_ones(init: float, said: str) -> None:
    found = health(Course(60, above(0.5), init=init))
    assert (found.verdict, found.severity) == (FLOORED, WARNING)
    assert said in found.explanation
    assert bool(said) == ("were not finite" in found.explanation)
    assert "too large" not in found.explanation
