"""How the writer's threads tell their owner, once each, that something was lost or that writing has stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa


def _ignore(_: object) -> None:
    """Nobody asked to be told."""


class Notices:
    """Passes each kind of notice, and the first failure, to the owner's callbacks, which must not raise."""

    def __init__(
        self, on_notice: Callable[[str], None] | None = None, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self.failure: BaseException | None = None
        self._on_notice = on_notice or _ignore
        self._on_failure = on_failure or _ignore
        self._given: set[str] = set()
        self._lock = threading.Lock()

    def give(self, kind: str, text: str) -> None:
        """Tell of something that was lost, the first time this ``kind`` of thing happens."""
        with self._lock:
            known = kind in self._given
            self._given.add(kind)
        if not known:
            self._on_notice(text)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around all that a background thread does: the disk's failures end writing, not the training process."""
        try:
            yield
        except (OSError, MemoryError, pa.ArrowException) as failure:
            self.fail(failure)
        except BaseException as failure:  # a mistake of ours: ends writing too, and shows where it is
            self.fail(failure)
            raise

    def fail(self, failure: BaseException) -> None:
        """Tell why writing has stopped."""
        with self._lock:
            known = self.failure is not None
            self.failure = self.failure or failure
        if not known:
            self._on_failure(failure)
