from __future__ import annotations

from dataclasses import replace

import pytest

from ampscope.analysis.words import (
    first_ranked,
    further_in_words,
    ranks_in_words,
    received_in_words,
    where_ranked,
)
from tests.support.verdicts.by_hand import OVERFLOW


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((3,), "rank 3"),
        ((2, 0), "ranks 0 and 2"),
        ((0, 1), "ranks 0 and 1"),
        ((0, 1, 2, 17), "ranks 0 to 2 and 17"),
        ((1, 3, 5, 7, 9, 11), "ranks 1, 3, 5, 7 and 2 more"),
        (tuple(range(1024)), "ranks 0 to 1,023"),
    ],
)
def test_ranks_are_named_and_many_are_counted(ranks: tuple[int, ...], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_a_run_of_one_rank_says_nothing_of_ranks() -> None:
    assert where_ranked(OVERFLOW) == first_ranked(OVERFLOW) == further_in_words(OVERFLOW) == ""


def test_where_it_began_and_who_received_it() -> None:
    incident = replace(OVERFLOW, world=8, rank=1, also_on=(4,), received_by=(0, 2))
    assert where_ranked(incident) == "on ranks 1 and 4 of 8"
    assert first_ranked(incident) == "on rank 1 of 8"
    assert further_in_words(incident) == "The same failed by itself on rank 4."
    assert received_in_words(incident) == "Ranks 0 and 2 received it."
    assert received_in_words(replace(incident, also_on=(), received_by=(0, *range(2, 8)))) == (
        "All 7 other ranks received it."
    )
    assert received_in_words(replace(incident, world=3, also_on=(), received_by=(0, 2))) == (
        "Both other ranks received it."
    )


def test_all_ranks_are_all_ranks() -> None:
    assert where_ranked(replace(OVERFLOW, world=2, also_on=(1,))) == "on both ranks"
    everywhere = replace(OVERFLOW, world=3, also_on=(1, 2))
    assert where_ranked(everywhere) == first_ranked(everywhere) == "on all 3 ranks"
    assert further_in_words(everywhere) == ""
