"""Fixtures of the tests that train in their own process: one thread, its random streams left as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ampscope  # noqa: E402  # after the check that torch is there


@pytest.fixture(autouse=True)
def quiet_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(streams[0])
    random.setstate(streams[1])
    np.random.set_state(streams[2])
    torch.set_num_threads(threads)


@pytest.fixture
def strict_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of AMPscope's own ends the test."""
    from ampscope.capture.torch_support import guard

    monkeypatch.setattr(guard, "RAISE", True)


@pytest.fixture
def watch(run_folder: Path) -> Iterator[Callable[..., ampscope.Scope]]:
    """`ampscope.watch` into a folder of the test's; everything it left open is closed in the end."""
    scopes: list[ampscope.Scope] = []

    def call(*args: Any, **options: Any) -> ampscope.Scope:
        folder = run_folder.with_name(f"run{len(scopes)}")
        scopes.append(ampscope.watch(*args, **{"dir": folder, "quiet": True, **options}))
        return scopes[-1]

    yield call
    for scope in scopes:
        scope.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of which this process is the only rank."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch was built without distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Two ranks of which one is here: torch's own fake process group, on which collectives return at once."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()
