"""Models are trained in this process, and a fault of AMPscope's own fails the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from ampscope.capture.torch_support import guard  # noqa: E402  # after the check that torch is there


@pytest.fixture(autouse=True)
def strict_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(guard, "RAISE", True)
    with torch.random.fork_rng():
        yield
