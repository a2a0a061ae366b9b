"""`Outbox` calls what belongs to others on a thread, and with random numbers, of its own: the training never waits."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

from ampscope.capture.record.draws import our_draws
from ampscope.capture.torch_support.guard import Guard

#: Calls that may wait; what comes while so many do is left out.
MOST_WAITING = 256
#: Seconds after which a call that has not returned, while `MOST_WAITING` wait for it, counts as hanging.
PATIENCE_S = 60.0

Call = Callable[[], object]


class Outbox:
    """Calls in order, one at a time, on a thread of its own.

    ``put`` takes no lock and may be called from anywhere, also inside itself (a collection, a signal handler). In a
    forked child it does nothing: that thread is not there.

    Args:
        guard: Told of a call that raises or hangs; nothing is called after that.
        patience: Seconds, see `PATIENCE_S`.

    Attributes:
        left_out: Calls that were not made because too many waited.
    """

    def __init__(self, guard: Guard, *, patience: float = PATIENCE_S) -> None:
        self.left_out = 0
        self._guard = guard
        self._patience = patience
        self._pid = os.getpid()
        self._closing = False
        self._since: float | None = None  # when the call in progress began
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._done = threading.Event()
        # It waits with nothing but the queue in its hands: what is called may hold the run, and ends with it.
        self._thread = threading.Thread(target=_work, args=(self._queue, self._done), name=guard.part, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The name of the guarded part, as the user would say it."""
        return self._guard.part

    def put(self, call: Call) -> None:
        """Leaves a call to be made; returns at once."""
        if self._closing or self._guard.broken or os.getpid() != self._pid:
            return
        if self._queue.qsize() >= MOST_WAITING:
            self.left_out += 1
            since = self._since
            if since is not None and time.monotonic() - since > self._patience:
                self._switch_off(f"a call that has not returned for {self._patience:.0f} s")
            return
        self._queue.put(lambda: self._make(call))

    def end(self, last: Call | None = None) -> None:
        """Takes nothing more; the thread ends after what waits, and after ``last``."""
        if not self._closing and last is not None:
            self.put(last)
        self._closing = True
        self._queue.put(None)

    def ended(self, deadline: float) -> bool:
        """Waits until all calls are made; the thread may go on with what it is at, and keeps no process alive.

        Args:
            deadline: By the clock of ``time.monotonic``, in seconds.

        Returns:
            Whether they are.
        """
        if os.getpid() != self._pid or threading.current_thread() is self._thread:
            return True
        return self._done.wait(max(0.0, deadline - time.monotonic()))

    def _make(self, call: Call) -> None:
        if self._guard.broken:
            return
        self._since = time.monotonic()
        with self._guard, our_draws():
            call()
        self._since = None

    def _switch_off(self, why: str) -> None:
        with self._guard:
            raise TimeoutError(why)


def _work(waiting: queue.SimpleQueue[Call | None], done: threading.Event) -> None:
    try:
        while (call := waiting.get()) is not None:
            call()
            del call
    finally:
        done.set()
