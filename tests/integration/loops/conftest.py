"""The loops train in the test's own process, on one thread, and leave its random streams as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")


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
