"""What is replayed and traced when failures come by the hundred, on a clock that the test moves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from ampscope.capture import budgets
from ampscope.capture.budgets import (
    ALWAYS_ARMED,
    ALWAYS_REPLAYED,
    ARMED_STEPS,
    EARLY_STEPS,
    SAME_FAILURE,
    ReplayBudget,
    TraceBudget,
)
from ampscope.trace.vocabulary import FORGOTTEN_AFTER

SHARE = 0.02
REPLAY_S = 0.1


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def _fail(replays: ReplayBudget, clock: Clock, failure: object, step: int, seconds: float = REPLAY_S) -> bool:
    fits = replays.allows(failure, step)
    if fits:
        replays.spent(seconds)
        replays.judged(seconds)
        clock.now += seconds
    return fits


class TestReplays:
    """Which of many incidents are replayed."""

    def test_a_failure_that_keeps_coming_back_costs_no_more_than_its_share(self, clock: Clock) -> None:
        replays, steps, spent = ReplayBudget(SHARE, 3), 5000, 0.0
        for step in range(steps):
            clock.now += 0.01
            if step % 3 == 0:
                spent += REPLAY_S * _fail(replays, clock, "the same", step)
        assert spent <= SAME_FAILURE * REPLAY_S + SHARE * clock.now
        assert spent >= 0.5 * SHARE * clock.now, "the share is there to be used"

    def test_what_was_not_seen_yet_has_the_free_seconds(self, clock: Clock) -> None:
        replays = ReplayBudget(SHARE, 3)
        replayed = [_fail(replays, clock, "the same", step) for step in range(8)]
        assert replayed == [True] * SAME_FAILURE + [False] * (8 - SAME_FAILURE)
        assert _fail(replays, clock, "another", 8)

    def test_a_failure_that_comes_back_after_a_while_may_be_another(self, clock: Clock) -> None:
        replays = ReplayBudget(SHARE, 3)
        for step in range(SAME_FAILURE):
            assert _fail(replays, clock, "the same", step)
        assert not _fail(replays, clock, "the same", SAME_FAILURE)
        assert _fail(replays, clock, "the same", SAME_FAILURE + FORGOTTEN_AFTER + 1)

    def test_where_it_helps_the_run_a_failure_that_stays_is_replayed_once_more(self, clock: Clock) -> None:
        for heals in (False, True):
            replays = ReplayBudget(0.0, 3, heals=heals)
            for step in range(ALWAYS_REPLAYED):
                assert _fail(replays, clock, step, step)
            replays.spent(budgets.FREE_REPLAY_SECONDS)
            assert [replays.allows("stays", step) for step in range(10, 14)] == [False, heals, False, False]
            assert [replays.allows("another", step) for step in (14, 15)] == [False, heals]
            assert replays.allows_trial(0)

    def test_the_first_of_another_kind_is_replayed_whatever_the_ones_before_have_cost(self, clock: Clock) -> None:
        replays = ReplayBudget(0.0, 3)
        for step in range(ALWAYS_REPLAYED):
            assert replays.allows("the scale", step, "gradients")
            replays.spent(budgets.FREE_REPLAY_SECONDS)
        assert not replays.allows("others", 3, "gradients")
        assert replays.allows("the loss", 4, "loss")
        assert replays.allows_trial(2), "and cures are looked for"
        assert not replays.allows("the loss again", 5, "loss")

    def test_what_is_made_of_a_replay_counts_too(self, clock: Clock) -> None:
        replays = ReplayBudget(0.0, 3)
        for step in range(ALWAYS_REPLAYED):
            assert replays.allows(step, step)
            replays.spent(0.001)
            replays.judged(budgets.FREE_REPLAY_SECONDS / ALWAYS_REPLAYED)
        assert not replays.allows("another", 3)

    def test_different_failures_end_with_the_free_seconds(self, clock: Clock) -> None:
        replays = ReplayBudget(0.0, 3)
        spent = sum(REPLAY_S * _fail(replays, clock, step, step) for step in range(500))
        assert spent <= budgets.FREE_REPLAY_SECONDS + REPLAY_S

    def test_other_forms_have_further_trials_while_replays_are_cheap(self, clock: Clock) -> None:
        replays = ReplayBudget(0.0, 3)
        assert replays.allows("overflow", 0)
        assert not replays.allows_trial(3)
        assert replays.allows_trial(2 + budgets.PROMISING_TRIALS, promising=True)
        assert not replays.allows_trial(3 + budgets.PROMISING_TRIALS, promising=True)
        replays.spent(budgets.FREE_REPLAY_SECONDS)
        assert replays.allows_trial(2, promising=True)
        assert not replays.allows_trial(3, promising=True), "dear ones have what others have"
        assert not ReplayBudget(1.0, 0).allows_trial(0, promising=True)


class TestTraces:
    """Which steps are traced as they run after incidents that no replay could explain."""

    def _traced(self, clock: Clock, *, steps: int, every: int) -> int:
        """Trains with an incident in ``every`` steps; a step takes 0.1 s, tracing it as long again."""
        traces, count = TraceBudget(None, SHARE), 0
        for step in range(steps):
            traced = traces.wants(step)
            count += traced
            clock.now += 0.2 if traced else 0.1
            if step % every == every - 1:
                traces.arm()
            traces.took(step, 0.2 if traced else 0.1, traced=traced)
        return count

    def test_the_first_incidents_are_followed(self, clock: Clock) -> None:
        sampled = len([8, 16, 32, 64])
        assert self._traced(clock, steps=100, every=50) == EARLY_STEPS + ARMED_STEPS + sampled

    def test_incidents_without_end_are_followed_within_the_share(self, clock: Clock) -> None:
        steps = 5000
        free = EARLY_STEPS + ALWAYS_ARMED * ARMED_STEPS
        assert self._traced(clock, steps=steps, every=3) <= free + SHARE * 1.1 * steps + ARMED_STEPS


class TestSamples:
    """Which healthy steps are traced."""

    def _sampled(
        self, clock: Clock, steps: int, left: Callable[[int], float] = lambda _: math.inf, cost: float = 0.1
    ) -> list[int]:
        """Trains; a step takes 0.1 s, tracing it ``cost`` more, and ``left`` says how long its values will last."""
        traces, found = TraceBudget(None, SHARE), []
        for step in range(steps):
            traced = traces.wants(step)
            if traced and traces.keeps(step):
                assert traces.is_full(step)
                found.append(step)
                traces.kept(steps_left=left(step))
            clock.now += 0.1 + cost * traced
            traces.took(step, 0.1 + cost * traced, traced=traced)
        return found

    def test_a_calm_run_is_sampled_ever_more_rarely(self, clock: Clock) -> None:
        expected = [0, 8, 16, 32, 64, 128, 256, 512, 1024, 2024, 3024]
        assert self._sampled(clock, 4000) == expected

    def test_within_the_first_thousand_steps_time_decides_nothing(self, clock: Clock) -> None:
        assert self._sampled(clock, 1000, cost=1000.0) == [0, 8, 16, 32, 64, 128, 256, 512]

    def test_what_costs_more_than_its_share_is_sampled_more_rarely(self, clock: Clock) -> None:
        assert self._sampled(clock, 9000, cost=3.0)[8:] == [1024, 3024, 7024]

    def test_what_grows_is_looked_at_several_times_before_it_overflows(self, clock: Clock) -> None:
        end = 560
        samples = self._sampled(clock, end, lambda step: end - step)
        assert samples[:6] == [0, 8, 16, 32, 64, 126]
        assert len([step for step in samples if step > end / 2]) >= 4

    def test_a_calm_sample_makes_the_next_come_later_again(self, clock: Clock) -> None:
        samples = self._sampled(clock, 2000, lambda step: 0.0 if 100 < step < 300 else math.inf)
        assert samples == [0, 8, 16, 32, 64, 128, 160, 200, 250, 312, 436, 684, 1180]

    @pytest.mark.parametrize(("every", "whole"), [(1, [0, 16, 32, 48]), (5, [0, 20, 40]), (20, [0, 20, 40])])
    def test_of_steps_that_were_asked_for_some_are_whole(self, every: int, whole: list[int]) -> None:
        traces = TraceBudget(every, SHARE)
        assert [step for step in range(60) if traces.wants(step) and traces.is_full(step)] == whole

    def test_what_has_to_be_replayed_for_it_is_kept_at_the_start_and_after_the_interval(self, clock: Clock) -> None:
        traces, found = TraceBudget(None, SHARE), []
        for step in range(4000):
            kept = traces.keeps_replay(step)
            if kept:
                found.append(step)
                traces.kept()
            clock.now += 0.1
            traces.took(step, 0.1, traced=kept)
        assert found == [0, 1000, 2000, 3000]
