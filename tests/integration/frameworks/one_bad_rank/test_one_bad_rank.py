"""One rank of several goes wrong: the verdict names that rank, and the others as who received it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

import ampscope
from ampscope.report.json import as_json
from ampscope.trace.schema import ReplayStatus, Table
from ampscope.trace.vocabulary import Cause, Verdict
from tests.integration.frameworks.one_bad_rank.training import BAD_STEP, STEPS
from tests.support.torchrun import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
]

_TRAINING = "tests.integration.frameworks.one_bad_rank.training"


def _weights(printed: str) -> str:
    return re.findall(r"weights (\w+)", printed)[-1]


def test_a_healthy_training_is_healthy_and_not_changed(tmp_path: Path) -> None:
    unwatched = on_ranks(_TRAINING, "-", "-1", ranks=2)
    watched = on_ranks(_TRAINING, tmp_path / "run", "-1", ranks=2)
    assert _weights(watched) == _weights(unwatched)
    diagnosis = ampscope.diagnose(tmp_path / "run")
    assert diagnosis.verdict is Verdict.HEALTHY
    assert "2 ranks are replicas: gradient norm, loss scale and skips agree at every step." in diagnosis.ranks


def test_the_rank_with_the_bad_batch_is_the_origin(tmp_path: Path) -> None:
    on_ranks(_TRAINING, tmp_path / "run", "1", ranks=2)
    with ampscope.open_run(tmp_path / "run") as run:
        replays = {rank: run.rows(Table.INCIDENTS, rank=rank)[0].replay for rank in run.ranks}
        diagnosis = ampscope.diagnose(run)
    assert replays[1] == ReplayStatus.EXACT
    assert replays[0] in (ReplayStatus.NOT_REPRODUCED, ReplayStatus.RECEIVED)
    told = json.loads(as_json(diagnosis))
    assert told["primary"]["rank"] == 1
    assert told["primary"]["received_by"] == [0]
    assert (told["primary"]["step"], told["primary"]["op"]) == (BAD_STEP, "aten.mul.Tensor")
    assert told["primary"]["cause"] == Cause.FP16_OVERFLOW
    assert "on rank 1 of 2: mul in module" in diagnosis.summary
    assert Cause.HARDWARE_TRANSIENT not in {incident.cause for incident in diagnosis.incidents}


def test_what_was_received_and_written_is_told_with_its_step_and_not_as_an_origin_of_its_own(tmp_path: Path) -> None:
    on_ranks(_TRAINING, tmp_path / "run", "1", "nan", ranks=3)
    diagnosis = ampscope.diagnose(tmp_path / "run")
    told = json.loads(as_json(diagnosis))
    born, *after = told["incidents"]
    assert told["primary"] == born
    assert (born["step"], born["rank"], born["received_by"], born["cause"]) == (BAD_STEP, 1, [0, 2], Cause.BAD_INPUT)
    assert "Both other ranks received it." in diagnosis.summary
    (weights,) = after
    assert (weights["cause"], weights["step"], weights["last_step"]) == (Cause.BAD_WEIGHT, BAD_STEP + 1, STEPS - 1)
    assert (weights["written_by"]["step"], weights["received_by"]) == (BAD_STEP, [])
    assert f"since step {BAD_STEP}" in weights["explanation"]


def test_of_two_ranks_whose_weights_part_both_are_named(tmp_path: Path) -> None:
    on_ranks(_TRAINING, tmp_path / "run", "1", "drift", ranks=2)
    diagnosis = ampscope.diagnose(tmp_path / "run")
    (parted,) = diagnosis.incidents
    assert diagnosis.primary == parted
    assert (parted.cause, parted.step, parted.rank, parted.also_on) == (Cause.REPLICA_APART, BAD_STEP, 0, (1,))
    assert f"At step {BAD_STEP - 1} they still were." in parted.explanation
    assert diagnosis.summary == parted.explanation
