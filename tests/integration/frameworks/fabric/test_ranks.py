"""Fabric's ``ddp``: the rank whose batch was bad is named exactly, the other has received what it averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ampscope
from ampscope.trace.schema import ReplayStatus, Table
from tests.integration.frameworks.fabric.ranks import SETTINGS
from tests.integration.frameworks.fabric.small_fabric import BAD, STEPS
from tests.support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


def test_two_ranks(tmp_path: Path) -> None:
    printed = torchrun("tests.integration.frameworks.fabric.ranks", tmp_path, ranks=2)
    for name in SETTINGS:
        assert [(tmp_path / f"{name}-{rank}.txt").read_text() for rank in range(2)] == ["alike"] * 2, printed
        run = ampscope.open_run(tmp_path / name)
        incidents = [run.rows(Table.INCIDENTS, rank=rank) for rank in range(2)]
        assert [[row.step for row in rows] for rows in incidents] == [[BAD], [BAD]]
        assert [rows[0].replay for rows in incidents] == [ReplayStatus.RECEIVED, ReplayStatus.EXACT], incidents
        assert [len(run.rows(Table.STEPS, rank=rank)) for rank in range(2)] == [STEPS, STEPS]
        sites = {row.code for row in run.rows(Table.SITES, rank=1) if row.op == "aten.mul.Tensor"}
        assert "squared = hidden * hidden" in sites
