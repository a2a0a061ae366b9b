"""A client that draws random numbers on a thread of ours does not draw the training's."""

from __future__ import annotations

import importlib
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampscope.capture.record.draws import our_draws, separate
from ampscope.capture.record.outbox import Outbox
from ampscope.capture.torch_support.guard import Guard


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of a package that waits a random time before it tries again."""
    (tmp_path / "some_client_retry.py").write_text(
        "import random\ndef jitter(): return random.random() + random.Random(1).random()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("some_client_retry")
    del sys.modules["some_client_retry"]


def test_on_a_thread_of_ours_the_stream_stays(client: Any) -> None:
    separate("some_client_retry")
    guard = Guard("the tracker", print)
    outbox = Outbox(guard)
    before, drawn = random.getstate(), []
    for _ in range(3):
        outbox.put(lambda: drawn.append(client.jitter()))
    outbox.end()
    assert outbox.ended(time.monotonic() + 60.0)
    assert not guard.broken
    assert random.getstate() == before
    assert len(set(drawn)) == 3


def test_elsewhere_it_draws_what_it_would_have(client: Any) -> None:
    random.seed(3)
    expected = client.jitter()
    separate("some_client_retry")
    with our_draws():
        random.seed(3)
        other: list[float] = []
        thread = threading.Thread(target=lambda: other.append(client.jitter()))
        thread.start()
        thread.join()
    assert other == [expected]
    random.seed(3)
    assert client.jitter() == expected
    assert client.random.SystemRandom is random.SystemRandom


def test_another_package_is_left_alone(client: Any) -> None:
    separate("some", "client")
    assert client.random is random
