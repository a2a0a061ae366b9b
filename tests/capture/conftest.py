"""Capture's tests train small models in this process, on one thread, and leave its random streams as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from .twins import Watched  # noqa: E402  # after the check that torch is there


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
def watched(run_folder: Path) -> Callable[..., Watched]:
    """Trains a loop watched, then reads what was recorded."""

    def train(loop: Callable[..., Any], **options: Any) -> Watched:
        return Watched.train(loop, run_folder, **options)

    return train
