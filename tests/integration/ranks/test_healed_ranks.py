"""Ranks that heal end with the bits of ranks whose cure was there by hand, and wait for none that does not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ampscope
from ampscope.trace.schema import EventKind, Table
from tests.integration.ranks.healed_ranks import RANKS
from tests.support.torchrun import on_ranks
from tests.unit.capture.heal.trained import BAD_STEP, SCALE

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")

BOTH = {"watched": [0, 1], "heal": [0, 1]}


def trained(folder: Path, **plan: Any) -> list[dict[str, Any]]:
    """Runs both ranks; what each came to."""
    folder.mkdir()
    on_ranks("tests.integration.ranks.healed_ranks", folder, json.dumps(plan), ranks=RANKS)
    one, other = (json.loads((folder / f"told-{rank}.json").read_text("utf-8")) for rank in range(RANKS))
    assert one["weights"] == other["weights"]
    return [one, other]


def events(folder: Path, kind: EventKind) -> list[tuple[int, str]]:
    """Step and text of each event of a kind, of all ranks."""
    run = ampscope.open_run(folder / "run")
    return [(row.step, row.text) for rank in run.ranks for row in run.rows(Table.EVENTS, rank=rank, kind=kind)]


@pytest.fixture(scope="module")
def unhealed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ranks come to of which the first goes bad and nobody heals, by what else they do."""
    home = tmp_path_factory.mktemp("unhealed")

    @cache
    def of(plan: str) -> list[dict[str, Any]]:
        return trained(home / str(len(list(home.iterdir()))), **json.loads(plan))

    return lambda **plan: of(json.dumps(plan))


@pytest.mark.parametrize("clips", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_ranks_are_healed_as_by_hand(tmp_path: Path, unhealed: Any, clips: bool) -> None:
    healed = trained(tmp_path / "healed", armed=[0], clips=clips, **BOTH)
    assert healed == unhealed(armed=[0], kept=[""], clips=clips)
    made = events(tmp_path / "healed", EventKind.CURE)
    assert [(step, json.loads(text)["kind"], json.loads(text)["applied"]) for step, text in made] == [
        (BAD_STEP, "modules_fp32", True)
    ] * RANKS


def test_one_rank_alone_changes_nothing_and_waits_for_nobody(tmp_path: Path, unhealed: Any) -> None:
    assert trained(tmp_path / "alone", armed=[0], watched=[0, 1], heal=[0]) == unhealed(armed=[0])
    assert (BAD_STEP, "healing ended: there is no healing on rank 1") in events(tmp_path / "alone", EventKind.NOTE)


@pytest.mark.slow
def test_a_bad_batch_on_one_rank_is_left_out_on_all(tmp_path: Path, unhealed: Any) -> None:
    healed = trained(tmp_path / "healed", spoilt=[1], **BOTH)
    assert [rank["scale"] for rank in healed] == [SCALE] * RANKS
    assert [rank["weights"] for rank in healed] == [rank["weights"] for rank in unhealed(spoilt=[1])]


@pytest.mark.slow
def test_ranks_that_stay_healthy_are_left_alone(tmp_path: Path, unhealed: Any) -> None:
    assert trained(tmp_path / "healed", clips=True, **BOTH) == unhealed(clips=True)
    assert events(tmp_path / "healed", EventKind.CURE) == []


@pytest.mark.slow
def test_ranks_whose_gradients_nobody_averages_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "healed"
    with pytest.raises(AssertionError):  # they train for themselves, and one goes bad
        trained(folder, armed=[0], ddp=False, **BOTH)
    assert events(folder, EventKind.CURE) == []
    assert "gradients are not averaged over all ranks" in str(events(folder, EventKind.NOTE))


def test_state_of_an_optimizer_is_left_as_it_is_and_that_is_told(tmp_path: Path) -> None:
    trained(tmp_path / "poisoned", **BOTH, poisoned=True)
    told = {text for _, text in events(tmp_path / "poisoned", EventKind.NOTE)}
    assert "not healed: the optimizer's state is not finite, and on several ranks no rank changes its own" in told
    kinds = {json.loads(text)["kind"] for _, text in events(tmp_path / "poisoned", EventKind.CURE)}
    assert kinds == {"left_out"}  # steps after it, for the weights are not finite any more
