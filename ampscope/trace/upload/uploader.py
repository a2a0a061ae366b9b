"""A thread copies a spool into the object store, tries again after longer waits, and ends before the process does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ampscope.errors import RunError
from ampscope.trace.location import BucketPath
from ampscope.trace.object_store import Store, new_store
from ampscope.trace.upload import spool
from ampscope.trace.upload.store_contents import Bucket
from ampscope.trace.upload.sync import Pace, SpoolSync


class Backoff:
    """Exponential back-off with full jitter.

    Args:
        first: Seconds after the first failure, at most.
        most: Seconds after any.
        chance: A source of random numbers of its own; the training's are never drawn from.
    """

    def __init__(self, first: float = 1.0, most: float = 60.0, chance: random.Random | None = None) -> None:
        self._first = first
        self._most = most
        self._chance = chance or random.Random()  # no secret
        self.failures = 0  #: one after another

    def worked(self) -> None:
        """The last try did what it should."""
        self.failures = 0

    def failed(self) -> float:
        """Counts a failure; returns the seconds to wait, between half of what is due and all of it."""
        due = min(self._first * 2.0 ** min(self.failures, 32), self._most)
        self.failures += 1
        return due * self._chance.uniform(0.5, 1.0)


#: Failures, one after another, through which a store is kept open.
_TRIES = 4


class Uploader:
    """Sends one rank's spool while the run is written, and until all of it has arrived.

    Args:
        folder: The spool.
        home: The run in the store.
        rank: Whose part.
        budget: Bytes that the rank's part may take in the store.
        tell: Takes a line for the user, from the thread.
        joined: Whether what is in the store was fetched, so that the run goes on there.
        pace: Seconds of everything that waits.
        opened: Opens the store.
    """

    def __init__(
        self,
        folder: Path,
        home: BucketPath,
        rank: int,
        *,
        budget: int,
        tell: Callable[[str], None],
        joined: bool = True,
        pace: Pace | None = None,
        opened: Callable[[], Store] | None = None,
    ) -> None:
        self._folder, self._rank, self._tell = folder, rank, tell
        self._pace = pace or Pace()
        self._bucket = Bucket(home, rank, opened or (lambda: new_store(home.scheme, tries=1)))
        self._sync = SpoolSync(folder, self._bucket, rank, budget=budget, tell=tell, joined=joined, pace=self._pace)
        self._backoff = Backoff(self._pace.first, self._pace.most)
        self._ended, self._woken = threading.Event(), threading.Event()
        self._leaving = threading.Lock()
        self._release: Callable[[], None] | None = None
        self._was_told = False
        self.thread = threading.Thread(target=self._work, name="ampscope-upload", daemon=True)

    @property
    def home(self) -> BucketPath:
        """The run's place in the store."""
        return self._bucket.home

    def begin(self) -> None:
        """Begin to send."""
        self.thread.start()

    def end(self, release: Callable[[], None]) -> None:
        """All is written and sealed. Send what is left, then call ``release``: nothing touches the spool any more."""
        self._release = release
        self._ended.set()
        self._woken.set()

    def wait(self) -> None:
        """Wait until all has arrived; not for ever where nothing does, and then say what is left where."""
        if threading.current_thread() is self.thread:
            return
        until = time.monotonic() + self._pace.close
        while self.thread.is_alive() and time.monotonic() < until:
            arrived = self._sync.arrived
            self.thread.join(min(self._pace.stalled, max(until - time.monotonic(), 0.0)))
            if self._sync.arrived == arrived:
                break
        if self.thread.is_alive():
            self._leave(clears=False)
            self._tell_left()

    def _work(self) -> None:
        has_arrived = False
        try:
            while not self._sync.is_abandoned and not has_arrived:
                is_last, pause = self._ended.is_set(), self._pace.look
                try:
                    has_arrived = self._sync.look(is_last=is_last) and is_last
                    self._backoff.worked()
                    if is_last and self._sync.conflicts():
                        break
                except (RunError, OSError) as error:
                    pause = self._failed(error)
                if not has_arrived:
                    self._woken.wait(pause)
                    self._woken.clear()
        finally:
            self._leave(clears=has_arrived)

    def _leave(self, *, clears: bool) -> None:
        """Touch the spool no more: from here on it may be another writer's."""
        with self._leaving:
            if self._sync.is_abandoned:
                return
            self._sync.is_abandoned = True
            if clears:
                spool.clear(self._folder, self._rank)
            release, self._release = self._release, None
            if release is not None:
                release()

    def _failed(self, error: Exception) -> float:
        """Seconds until the next try; told the first time."""
        pause = self._backoff.failed()
        if isinstance(error.__cause__, PermissionError) or self._backoff.failures % _TRIES == 0:
            self._bucket.forget()  # credentials may have been renewed; to open a store takes a fifth of a second
        if not self._was_told:
            self._was_told = True
            self._tell(
                f"{_sentence(error)} The run is kept in {self._folder} and sent when it can be; training goes on."
            )
        return min(pause, self._pace.look) if self._ended.is_set() else pause

    def _tell_left(self) -> None:
        left = len(self._sync.left())
        self._tell(
            f"{left} file{'s' if left > 1 else ''} of the run could not be sent to {self.home} yet: in {self._folder}. "
            f"Send what is left: ampscope upload {self._folder}"
        )


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('. ')}."


_known: set[Callable[[], None]] = set()


def before_exit(call: Callable[[], None]) -> None:
    """Call it when the main thread is over, once however often this is said; where Python has no such moment, not."""
    register = getattr(threading, "_register_atexit", None)
    if register is None or call in _known:
        return
    _known.add(call)
    with suppress(RuntimeError):  # the process is ending already
        register(call)
