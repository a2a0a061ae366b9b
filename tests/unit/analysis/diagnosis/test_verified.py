"""What became of a failure: cured is what has not come back, where loss and gradient norm are as they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.analysis.diagnosis.gate import Outcome
from ampscope.analysis.diagnosis.verified import Size, sizes, verified
from ampscope.analysis.results import Diagnosis
from ampscope.trace.read.run import open_run
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.by_hand import BROKEN, CLIPPED, HEALTHY, MISUSED, OVERFLOW

USUAL = Size("loss", now=0.1, usual=0.12, steps=20, is_usual=True)
LARGE = Size("gradient norm", now=5000.0, usual=1.0, steps=20, is_usual=False)
BEFORE = replace(BROKEN, primary=replace(OVERFLOW, step=1), incidents=(replace(OVERFLOW, step=1),), findings=())
RISK = replace(OVERFLOW, severity=Severity.WARNING, cause=Cause.NEAR_OVERFLOW)
AT_RISK = replace(HEALTHY, verdict=Verdict.AT_RISK, primary=RISK, incidents=(RISK,))


@pytest.mark.parametrize(
    ("after", "code", "found", "outcome", "begins"),
    [
        (HEALTHY, 0, (USUAL,), Outcome.PASSED, "Cured: before, "),
        (AT_RISK, 0, (USUAL,), Outcome.PASSED, "Cured: before, "),
        (BROKEN, 0, (USUAL,), Outcome.FAILED, "Not cured: before, "),
        (BROKEN, 3, (USUAL,), Outcome.FAILED, "Not cured: before, "),
        (HEALTHY, 0, (USUAL, LARGE), Outcome.FAILED, "Not cured: before, "),
        (HEALTHY, 0, (USUAL, LARGE._replace(steps=2)), Outcome.NOT_KNOWN, "Not known: before, "),
        (HEALTHY, 0, (), Outcome.NOT_KNOWN, "Not known: before, "),
        (HEALTHY, 3, (USUAL,), Outcome.NOT_KNOWN, "Not known: it has not come back in "),
        (replace(HEALTHY, verdict=Verdict.NOT_OBSERVED), 0, (USUAL,), Outcome.NOT_KNOWN, "Not known: before, "),
        (replace(HEALTHY, run=replace(HEALTHY.run, steps=1)), 0, (USUAL,), Outcome.NOT_KNOWN, "Not known: before, "),
    ],
)
def test_what_became_of_the_failure(
    after: Diagnosis, code: int, found: tuple[Size, ...], outcome: Outcome, begins: str
) -> None:
    came, text = verified(BEFORE, after, found, code)
    assert (came, text.startswith(begins)) == (outcome, True), text


def test_sizes_are_told() -> None:
    cured, grown = (verified(BEFORE, HEALTHY, found, 0)[1] for found in ((USUAL,), (USUAL, LARGE)))
    assert cured.endswith("it has not come back in 41,900 steps. In the latest steps: the loss 0.1 (usual: 0.12).")
    assert "but the gradient norm did not stay as before." in grown
    assert grown.endswith("In the latest steps: the loss 0.1 (usual: 0.12), the gradient norm 5,000 (usual: 1).")


def test_another_failure_is_told_as_one() -> None:
    other = replace(OVERFLOW, cause=Cause.DIVERGENCE)
    after = replace(BROKEN, primary=other, incidents=(other,))
    assert "with the remedy, now " in verified(BEFORE, after, (USUAL,), 0)[1]
    assert "with the remedy, still " in verified(BEFORE, BROKEN, (USUAL,), 0)[1]
    had_it = replace(BEFORE, incidents=(OVERFLOW, other))
    assert "with the remedy, that has gone, but as before " in verified(had_it, after, (USUAL,), 0)[1]


def test_a_failure_that_is_not_told_first_any_more_has_come_back_all_the_same() -> None:
    after = replace(MISUSED, incidents=(OVERFLOW,))
    told = verified(replace(BEFORE, findings=(CLIPPED,)), after, (USUAL,), 0)
    assert (told[0], "with the remedy, still a value too large" in told[1]) == (Outcome.FAILED, True)


def test_a_risk_that_is_still_there_is_not_cured() -> None:
    assert verified(AT_RISK, AT_RISK, (USUAL,), 0)[0] is Outcome.FAILED


def test_a_mistake_that_was_there_before_is_no_new_one() -> None:
    moved = replace(CLIPPED, step=3, source=replace(CLIPPED.source, line=14))  # type: ignore[type-var]  # it has one
    after = replace(MISUSED, primary=moved, findings=(moved,))
    told = verified(replace(BEFORE, findings=(CLIPPED,)), after, (USUAL,), 0)
    assert told[0] is Outcome.PASSED
    assert told[1].endswith(" Still there, as before: gradients clipped before they were unscaled.")
    new = verified(BEFORE, after, (USUAL,), 0)
    assert (new[0], "with the remedy, now gradients clipped" in new[1]) == (Outcome.FAILED, True)


def test_a_mistake_that_was_to_be_mended_is_still_there() -> None:
    told = verified(MISUSED, MISUSED, (USUAL,), 0)
    assert (told[0], "with the remedy, still gradients clipped" in told[1]) == (Outcome.FAILED, True)


# -- sizes ------------------------------------------------------------------------------------------------------------


def of_sizes(
    folder: Path,
    losses: Sequence[float],
    norms: Sequence[float],
    *,
    failed: Any = None,
    optimizers: int = 1,
    before: tuple[float, float] = (0.1, 1.0),
) -> list[tuple[str, bool]]:
    """What a run is told to be beside one that failed at step 10."""
    first, again = TraceBuilder(folder / "first"), TraceBuilder(folder / "again")
    for optimizer in range(optimizers):
        for _ in range(10):
            first.step(optimizer=optimizer, loss=before[0], grad_norm=before[1])
        first.step(optimizer=optimizer, loss=math.nan, grad_norm=math.nan, skipped=True)
        for loss, norm in zip(losses, norms, strict=True):
            again.step(optimizer=optimizer, loss=loss, grad_norm=norm)
    failed = failed or replace(OVERFLOW, step=10)
    with open_run(first.close()) as one, open_run(again.close()) as other:
        return [(each.quantity, each.is_usual) for each in sizes(one, other, failed)]


GOOD = [("loss", True), ("gradient norm", True)]


@pytest.mark.parametrize(
    ("losses", "norms", "found"),
    [
        pytest.param([0.1] * 40, [1.0] * 40, GOOD, id="as before"),
        pytest.param([0.1] * 10 + [0.15] * 30, [1.0] * 10 + [7.0] * 30, GOOD, id="about so"),
        pytest.param([0.1 * 0.97**step for step in range(40)], [1.2**step for step in range(40)], GOOD, id="it learns"),
        pytest.param([0.1, *[50.0] * 5, *[0.1] * 34], [1.0] * 40, GOOD, id="a bad batch"),
        pytest.param([0.1] * 10 + [0.5] * 30, [1.0] * 40, [("loss", False), GOOD[1]], id="a loss that stays up"),
        pytest.param(
            [0.1] * 40, [1.0] * 10 + [5000.0] * 30, [GOOD[0], ("gradient norm", False)], id="a norm that does"
        ),
        pytest.param([0.1] * 40, [1.0] * 10 + [0.0] * 30, [GOOD[0], ("gradient norm", False)], id="no gradient"),
        pytest.param([0.1] * 5, [1.0] * 5, [], id="too short"),
    ],
)
def test_what_is_usual_is_known_from_the_first_run(
    losses: list[float], norms: list[float], found: list[tuple[str, bool]], tmp_path: Path
) -> None:
    assert of_sizes(tmp_path, losses, norms) == found


def test_losses_with_a_sign_and_those_of_several_optimizers_have_no_usual_size(tmp_path: Path) -> None:
    assert of_sizes(tmp_path / "a", [5.0] * 40, [1.0] * 40, before=(-1.0, 1.0)) == GOOD[1:]
    assert of_sizes(tmp_path / "b", [5.0] * 40, [1.0] * 40, optimizers=2) == GOOD[1:] * 2


@pytest.mark.parametrize("failed", [replace(CLIPPED, step=2), replace(OVERFLOW, step=0)])
def test_where_no_step_before_was_good_the_new_run_tells_what_is_usual(failed: Any, tmp_path: Path) -> None:
    assert of_sizes(tmp_path / "a", [5.0] * 40, [900.0] * 40, failed=failed) == GOOD
    grown = of_sizes(tmp_path / "b", [5.0] * 20 + [50.0] * 20, [1.0] * 20 + [90.0] * 20, failed=failed)
    assert grown == [("loss", False), ("gradient norm", False)]
