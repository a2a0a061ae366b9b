"""Lightning's ``ddp``: training_step goes through forward, and the rank whose batch was bad is named exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ampscope
from ampscope.trace.schema import ReplayStatus, Table
from tests.integration.frameworks.lightning.ranks import BAD, STEPS
from tests.support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

PROGRAM = "tests.integration.frameworks.lightning.ranks"


@pytest.mark.parametrize("names", [("16-mixed", "accumulated"), ("manual", "logged")], ids=" ".join)
def test_two_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    printed = torchrun(PROGRAM, tmp_path, *names, ranks=2)
    for name in names:
        told = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2)]
        assert all(each["alike"] and each["logged"] for each in told), printed
        (folder,) = {each["folder"] for each in told}
        run = ampscope.open_run(folder)
        assert run.ranks == [0, 1]
        for rank in range(2):
            steps = {row.step for row in run.rows(Table.STEPS, rank=rank)}
            assert steps == set(range(STEPS))
        first = {rank: run.rows(Table.INCIDENTS, rank=rank)[0] for rank in range(2)}
        assert [first[rank].step for rank in range(2)] == [BAD, BAD]
        assert [first[rank].replay for rank in range(2)] == [ReplayStatus.RECEIVED, ReplayStatus.EXACT], first
    if "logged" in names:
        assert Path(folder).parent == tmp_path / "logged" / "logs" / "lightning_logs" / "version_0"
