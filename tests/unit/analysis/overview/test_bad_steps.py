from __future__ import annotations

import math

import pytest

from ampscope.analysis.overview.bad_steps import BadAttempt, RankPart, Sighting, bad_steps
from ampscope.trace.schema import ReplayStatus, Trigger

NAN = math.nan
GRADIENT, LOSS = Trigger.NONFINITE_GRADIENT, Trigger.NONFINITE_LOSS
EXACT, AGAIN = ReplayStatus.EXACT, ReplayStatus.NOT_REPRODUCED
RECEIVED, UNAVAILABLE = ReplayStatus.RECEIVED, ReplayStatus.UNAVAILABLE


def seen(rank: int, replay: str, *, loss: float = 1.0, trigger: str = GRADIENT, step: int = 8) -> Sighting:
    return Sighting(step, 0, rank, trigger, replay, loss)


def ranks(bad: BadAttempt) -> tuple[list[int], list[int], list[int]]:
    """On which ranks it began, which received it, and which were not heard."""
    return [one.rank for one in bad.origins], [one.rank for one in bad.received], list(bad.unheard)


@pytest.mark.parametrize(
    ("sighting", "part"),
    [
        (seen(0, EXACT), RankPart.OWN),
        (seen(0, ReplayStatus.DIVERGED), RankPart.OWN),
        (seen(0, AGAIN), RankPart.RECEIVED),
        (seen(0, RECEIVED), RankPart.RECEIVED),
        (seen(0, RECEIVED, loss=NAN), RankPart.RECEIVED),
        (seen(0, AGAIN, loss=NAN, trigger=LOSS), RankPart.OWN),
        (seen(0, UNAVAILABLE, loss=NAN, trigger=LOSS), RankPart.OWN),
        (seen(0, UNAVAILABLE), RankPart.UNCLEAR),
        (seen(0, UNAVAILABLE, trigger=Trigger.NONFINITE_BUFFER), RankPart.OWN),
    ],
)
def test_a_rank_is_judged_by_its_own_record(sighting: Sighting, part: RankPart) -> None:
    assert sighting.part is part


def test_the_rank_whose_own_calculation_failed_is_the_origin() -> None:
    (bad,) = bad_steps([seen(0, AGAIN), seen(1, EXACT, loss=NAN, trigger=LOSS)], {0: 9, 1: 9}, 2)
    assert ranks(bad) == ([1], [0], [])


def test_a_rank_that_could_not_be_replayed_received_what_another_had() -> None:
    (bad,) = bad_steps([seen(0, UNAVAILABLE), seen(1, EXACT)], {0: 9, 1: 9}, 2)
    assert ranks(bad) == ([1], [0], [])


def test_two_ranks_may_fail_at_once() -> None:
    (bad,) = bad_steps([seen(0, EXACT), seen(1, RECEIVED), seen(2, EXACT)], {0: 9, 1: 9, 2: 9}, 3)
    assert ranks(bad) == ([0, 2], [1], [])


def test_where_all_are_cleared_it_came_from_one_that_is_not_there() -> None:
    (bad,) = bad_steps([seen(0, RECEIVED), seen(1, AGAIN)], {0: 9, 1: 9, 2: 5}, 4)
    assert ranks(bad) == ([], [0, 1], [2, 3])


def test_the_one_that_nothing_clears_is_left() -> None:
    (bad,) = bad_steps([seen(0, AGAIN), seen(1, UNAVAILABLE)], {0: 9, 1: 9}, 2)
    assert ranks(bad) == ([1], [0], [])


def test_a_fault_that_does_not_repeat_is_one_only_where_nobody_can_have_sent_it() -> None:
    (bad,) = bad_steps([seen(0, AGAIN)], {0: 9, 1: 9}, 2)
    assert ranks(bad) == ([0], [], [])
    (bad,) = bad_steps([seen(0, AGAIN)], {0: 9}, 2)
    assert ranks(bad) == ([], [0], [1])
    (bad,) = bad_steps([seen(0, RECEIVED)], {0: 9, 1: 9}, 2)
    assert ranks(bad) == ([], [0], [])


def test_a_run_of_one_rank_receives_nothing() -> None:
    found = bad_steps([seen(0, AGAIN, step=3), seen(0, AGAIN, step=2)], {}, 1)
    assert [(bad.step, *ranks(bad)) for bad in found] == [(2, [0], [], []), (3, [0], [], [])]


def test_a_bad_step_after_one_that_was_written_is_its_aftermath() -> None:
    sightings = [seen(rank, UNAVAILABLE, step=step) for step in (4, 5, 6, 8) for rank in (0, 1)]
    found = bad_steps(sightings, {0: 9, 1: 9}, 2, written={(0, 4), (0, 5), (0, 6)})
    assert [(bad.step, bad.since) for bad in found] == [(4, None), (5, 4), (6, 4), (8, None)]


def test_a_step_that_was_skipped_for_bad_weights_leaves_them_so() -> None:
    sightings = [seen(0, EXACT, step=step) for step in (4, 5, 6)]
    found = bad_steps(sightings, {0: 9}, 1, written={(0, 4)})
    assert [bad.since for bad in found] == [None, 4, 4]


def test_a_bad_step_after_one_that_was_skipped_began_by_itself() -> None:
    sightings = [seen(0, EXACT, step=step) for step in (4, 5)]
    for size in (1, 2):
        assert [bad.since for bad in bad_steps(sightings, {0: 9, 1: 9}, size)] == [None, None]
