"""No rank makes a step with the gradients of all that another one does not make."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ampscope.capture.heal.rank_agreement import Agreement
from ampscope.capture.torch_support.process_group import Ballot

DIST: Any = torch.distributed
pytestmark = pytest.mark.skipif(not DIST.is_available(), reason="torch was built without distributed")


def nothing(*_: Any) -> Any:
    raise AssertionError("nothing is tried here")


def agreements(ranks: int, *, wait_s: float = 60.0) -> list[Agreement]:
    store: Any = DIST.HashStore()
    nobody: Any = None
    return [Agreement(Ballot(store, "run", rank, ranks, wait_s), nobody, nothing, nothing) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("reasons", "told"),
    [(["", ""], ""), (["", "its gradients would be large"], "its gradients would be large")],
)
def test_all_or_none(reasons: list[str], told: str) -> None:
    with ThreadPoolExecutor(2) as ranks:
        got = list(ranks.map(lambda each, why: each.all_may("0-3", why), agreements(2), reasons))
    assert got == [told] * 2


def test_none_where_a_rank_says_nothing() -> None:
    one, other = agreements(2, wait_s=0.0)
    reason = one.all_may("0-3", "")
    assert reason == other.all_may("0-3", "") == "a rank has not said in time what it has proved"


def test_a_rank_that_takes_no_part_tells_all() -> None:
    one, other = agreements(2)
    refused = one.refuse("0-3", "the tape is off").decision
    assert (refused.is_last, refused.why_not) == (True, "on rank 0, the tape is off")
    assert other.refuse("0-3", "another reason").decision == refused
