"""What trainings share, and a process group of one rank, which ``ShardedGradScaler`` asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.training.fixtures import quiet_process, watch  # noqa: F401  # fixtures


@pytest.fixture
def one_rank() -> Iterator[None]:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
