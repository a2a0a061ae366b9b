"""Models are trained in this process, and nothing that one test compiled is left for the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.training.fixtures import quiet_process, watch

__all__ = ["fresh_compiler", "quiet_process", "watch"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
