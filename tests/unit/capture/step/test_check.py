"""The runner of checks: what a check asks is run again, what it finds is reported, and what costs is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.checks.check import Asks, Check, CheckContext, CheckFinding
from ampscope.capture.events import StepAttempt
from ampscope.capture.rerun.engine import LookDepth, Ran, Rerun, RerunEngine
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import ReplayStatus, Trigger

NOTHING: Any = None


class Incidents:
    """Notes what it is told of."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Trigger]] = []

    def report(self, _: StepAttempt, trigger: Trigger, *__: object) -> None:
        self.told.append(("reported", trigger))

    def judge(self, _: StepAttempt, bad: Any, __: object) -> None:
        self.told.append(("judged", bad.trigger))


class Attempt:
    """As much of an attempt as a check needs."""

    bad = False
    judging_s = 0.0


class Twice(Check):
    """Runs a step twice; finds something if both could be run."""

    needs_tape = False
    outcome: ReplayResult | None = ReplayResult(ReplayStatus.EXACT)

    def due(self, attempt: StepAttempt) -> Asks | None:
        return self._asks()

    def _asks(self) -> Asks:
        for look in LookDepth.FULL, LookDepth.RESULT:
            ran: Ran = yield Rerun(NOTHING, ReplayChange(), look)
            if ran.reason:
                return None
        return CheckFinding(Trigger.LOST_GRADIENT, Evidence(), NOTHING, self.outcome)


class Unasked(Twice):
    """Finds something without a run."""

    def _asks(self) -> Asks:
        yield from ()
        return CheckFinding(Trigger.LOST_GRADIENT, Evidence(), NOTHING, self.outcome)


def made(kind: type[Twice], *, trials: int = 3) -> tuple[Twice, Incidents]:
    models, incidents = Models([nn.Linear(1, 1)]), Incidents()
    budget = ReplayBudget(1.0, trials)
    engine = RerunEngine(models, Sites(0, models.module_type), budget, Guard("the test", pytest.fail))
    told: Any = incidents
    return kind(CheckContext(engine, NOTHING, NOTHING, told)), incidents


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[LookDepth]:
    """How much was observed of each run, in order."""
    seen: list[LookDepth] = []

    def run(_: RerunEngine, rerun: Rerun) -> Ran:
        seen.append(rerun.look)
        return Ran()

    monkeypatch.setattr(RerunEngine, "run", run)
    return seen


def steps(check: Check, *, bad: bool = False) -> Any:
    attempt: Any = Attempt()
    attempt.bad = bad
    check.optimizer_steps(attempt)
    return attempt


def test_what_it_asks_is_run_in_turn_and_what_it_finds_reported(looks: list[LookDepth]) -> None:
    check, incidents = made(Twice)
    attempt = steps(check)
    assert looks == [LookDepth.FULL, LookDepth.RESULT]
    assert incidents.told == [("reported", Trigger.LOST_GRADIENT)]
    assert (attempt.judging_s > 0, check.looks) == (True, 1)


def test_a_finding_without_a_replay_is_judged_as_a_bad_step_is(looks: list[LookDepth]) -> None:
    check, incidents = made(Unasked)
    check.outcome = None
    steps(check)
    assert (looks, incidents.told) == ([], [("judged", Trigger.LOST_GRADIENT)])


def test_a_run_that_cannot_be_made_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RerunEngine, "run", lambda *_: Ran(reason="no room"))
    check, incidents = made(Twice)
    steps(check)
    assert incidents.told == []


def test_a_bad_step_is_asked_nothing(looks: list[LookDepth]) -> None:
    check, _ = made(Twice)
    steps(check, bad=True)
    assert looks == []


def test_who_wants_no_trial_gets_none(looks: list[LookDepth]) -> None:
    check, _ = made(Twice, trials=0)
    steps(check)
    assert (looks, check.looks) == ([], 0)


def test_the_first_looks_are_made_whatever_they_cost(looks: list[LookDepth], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayBudget, "_within_share", lambda *_: False)
    check, _ = made(Twice)
    check.free_looks = 1
    steps(check)
    steps(check)
    assert len(looks) == 2
