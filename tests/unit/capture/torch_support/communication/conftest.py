"""Two ranks of which one is here: torch's own fake process group, on which collectives return at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def two_ranks() -> Iterator[None]:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
