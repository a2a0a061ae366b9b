"""Ranks decide alike, whoever comes late, and wait for each other no longer than they have to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ampscope.capture.torch_support import own_collectives, process_group
from ampscope.capture.torch_support.own_collectives import Averaging
from ampscope.capture.torch_support.process_group import Ballot

DIST: Any = torch.distributed
pytestmark = pytest.mark.skipif(not DIST.is_available(), reason="torch was built without distributed")


@pytest.fixture
def ballots() -> list[Ballot]:
    store = DIST.HashStore()
    return [Ballot(store, "run", rank, 3, wait_s=60.0) for rank in range(3)]


def test_all_get_the_votes_of_all(ballots: list[Ballot]) -> None:
    with ThreadPoolExecutor(3) as ranks:
        got = list(ranks.map(lambda each: each.votes("0-3/proved", f"of {each.rank}"), ballots))
    assert got == [["of 0", "of 1", "of 2"]] * 3


def test_the_first_decision_is_everybodys(ballots: list[Ballot]) -> None:
    assert ballots[2].settled("0-3", "no") == "no"
    assert ballots[0].settled("0-3", "yes") == "no"
    assert ballots[0].settled("0-4", "yes") == "yes"


def test_where_one_has_decided_for_all_nobody_waits(ballots: list[Ballot]) -> None:
    ballots[1].settled("0-3", "no")
    assert ballots[0].votes("0-3/proved", "mine") is None


class DecidedInBetween:
    """A store in which the other rank votes, and decides, right after this one has looked for its vote."""

    def __init__(self) -> None:
        self._inner = DIST.HashStore()
        self.other: Ballot | None = None

    def check(self, names: list[str]) -> bool:
        found = bool(self._inner.check(names))
        other, self.other = self.other, None
        if other is not None and names[0].endswith("0-3/tried/1"):
            assert other.votes("0-3/tried", "of 1") == ["of 0", "of 1"]
            other.settled("0-3", "yes")
        else:
            self.other = other
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_who_has_just_missed_the_last_vote_has_it_all_the_same() -> None:
    store = DecidedInBetween()
    mine, store.other = Ballot(store, "run", 0, 2), Ballot(store, "run", 1, 2)
    assert mine.votes("0-3/tried", "of 0") == ["of 0", "of 1"]
    assert mine.settled("0-3", "no") == "yes"


def test_who_does_not_come_is_not_waited_for_without_end() -> None:
    store = DIST.HashStore()
    ballot = Ballot(store, "run", 0, 2, wait_s=0.0)
    assert ballot.missing() == [1]
    assert ballot.votes("0-3/proved", "mine") is None
    assert ballot.settled("0-3", "no") == "no"
    late = Ballot(store, "run", 1, 2, wait_s=0.0)
    assert late.missing() == []
    assert late.votes("0-3/proved", "mine") == ["mine", "mine"]
    assert late.settled("0-3", "yes") == "no"


def test_without_a_process_group_there_is_none() -> None:
    assert process_group.ballot("run") is None


@pytest.mark.usefixtures("alone")
def test_an_average_has_the_shapes_of_what_it_was_made_of() -> None:
    ballot = process_group.ballot("run")
    assert ballot is not None
    assert (ballot.rank, ballot.ranks, ballot.missing()) == (0, 1, [])
    given = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(2, dtype=torch.float16), "c": torch.tensor(3.0)}
    averaged = Averaging(given).over(process_group.default_group())
    assert averaged.keys() == given.keys()
    assert all(torch.equal(averaged[name], given[name]) for name in given)
    assert own_collectives.gradient_signature(given) == own_collectives.gradient_signature(averaged)
    assert not own_collectives.why_not_averaged(given)
    assert own_collectives.why_not_averaged({"a": torch.eye(2).to_sparse()})
    assert process_group.plain_group([]) is None
