"""Models are trained in this process; each test gets an accelerate that no other test has configured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.integration.frameworks.hugging_face.small_accelerator import forget_accelerate
from tests.support.training.fixtures import quiet_process, watch

__all__ = ["own_accelerate", "quiet_process", "watch"]


@pytest.fixture(autouse=True)
def own_accelerate() -> Iterator[None]:
    """Accelerate shares one state among all accelerators of a process, precision and compiler included."""
    forget_accelerate()  # the accelerators of other files, too
    yield
    forget_accelerate()
    torch._dynamo.reset()
