"""Everything that a run tells to others while it trains: who is told of what, in which order, and for how long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ampscope.capture.record.signals.alert import Alert
from ampscope.capture.record.signals.diagnosing import Diagnosing, diagnosed
from ampscope.capture.record.signals.outbox import Outbox
from ampscope.capture.record.signals.rate_limit import RateLimit
from ampscope.capture.record.signals.tracker import Tracker
from ampscope.capture.record.signals.webhook import Webhook
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.errors import WatchError
from ampscope.trace.write.writer import TraceWriter

#: Seconds that the end of a run waits for figures; and for alerts, of which the diagnosis may take the first part.
CLOSE_S, CLOSE_WITH_ALERTS_S, DIAGNOSIS_AT_END_S = 2.0, 10.0, 8.0
#: Seconds that an alert waits for the end of its step, of which the diagnosis wants to know.
_STEP_S = 5.0

OnIncident = Callable[[Alert], object]


@dataclass(frozen=True, slots=True)
class Receivers:
    """Who is to be told."""

    trackers: tuple[Tracker, ...] = ()
    on_incident: OnIncident | None = None
    webhook: Webhook | None = None

    def __bool__(self) -> bool:
        return bool(self.trackers) or self.on_incident is not None or self.webhook is not None


def receivers(log_to: object, on_incident: Any, webhook: Any) -> Receivers:
    """Who is to be told, as `ampscope.watch` was asked.

    Raises:
        WatchError: One of them is not what it has to be.
    """
    asked: list[object] = [] if log_to is None else [*log_to] if isinstance(log_to, list | tuple) else [log_to]
    trackers: list[Tracker] = []
    for each in asked:
        if isinstance(each, type) or not isinstance(each, Tracker):
            raise WatchError(
                f"log_to= takes trackers, as ampscope.integrations.trackers.TensorBoard('logs'), "
                f"not {each.__name__ if isinstance(each, type) else type(each).__name__}"
            )
        every: object = each.every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise WatchError(f"every={every!r}: a tracker is sent figures at one step in this many, at least 1")
        trackers.append(each)
    if on_incident is not None and not callable(on_incident):
        raise WatchError(f"on_incident= takes a function of one ampscope.Alert, not {type(on_incident).__name__}")
    return Receivers(tuple(trackers), on_incident, Webhook(webhook) if webhook is not None else None)


class Signals:
    """Hands figures and alerts to whoever is to be told, each on a thread of its own.

    Trackers are told by rank 0, of all that it hears of; the others of each alert by the one rank that tells it.

    Args:
        told: Who is to be told.
        writer: The run's, on this rank.
        guard_for: Makes the guard of a part, by what the part is called in a warning.
        notice: Takes a line about what could not be told.
    """

    def __init__(
        self,
        told: Receivers,
        writer: TraceWriter,
        guard_for: Callable[[str], Guard],
        notice: Callable[[str], None],
    ) -> None:
        self._flush, self._notice = writer.flush, notice
        trackers = told.trackers if writer.rank == 0 else ()
        self._trackers = [(each, Outbox(guard_for(f"the tracker {type(each).__name__}"))) for each in trackers]
        self._others: list[tuple[OnIncident, Outbox]] = []
        if told.on_incident is not None:
            self._others.append((told.on_incident, Outbox(guard_for("on_incident"))))
        self._webhook = told.webhook
        if told.webhook is not None:
            self._others.append((told.webhook.send, Outbox(guard_for("the webhook"))))
        self._alerts = Outbox(guard_for("the diagnosis of alerts")) if self._trackers or self._others else None
        self._limit = RateLimit()
        self._diagnosing = Diagnosing(writer.folder)
        self._waiting = threading.Semaphore(0)  # a step has ended
        self._newest, self._closing, self._pid = -1, False, os.getpid()
        self._asked = self._told = 0  # alerts; the first is counted by the training's thread, the other by theirs
        for tracker, outbox in self._trackers:
            outbox.put(partial(tracker.begin, writer.home))

    def step(self, step: int, figures: Callable[[], Mapping[str, float]]) -> None:
        """A step is over and its row is written.

        Args:
            step: Its number.
            figures: Gives the run's figures so far, by name.
        """
        self._newest = step
        if self._pending and self._is_here:
            self._waiting.release()
        due = [(tracker, outbox) for tracker, outbox in self._trackers if step % tracker.every == 0]
        if due:
            now = figures()
            for tracker, outbox in due:
                outbox.put(partial(tracker.figures, step, now))

    def admits(self) -> int | None:
        """Whether one more alert is told now; then how many were not, since the one before."""
        return self._limit.admits() if self._alerts is not None and self._is_here and not self._closing else None

    def alert(self, alert: Alert, *, to_all: bool = True) -> None:
        """Something needs a look; it is told with its diagnosis, when there is one.

        Args:
            alert: What was seen.
            to_all: Not to trackers alone, for another rank tells the others.
        """
        if self._alerts is not None and (to_all or self._trackers):
            self._asked += 1
            self._alerts.put(lambda: self._tell(alert, to_all=to_all))

    def close(self) -> None:
        """The run has ended: waits a little for what is still to be told, and leaves the rest."""
        if self._alerts is None or self._closing or not self._is_here:
            return
        self._closing, now = True, time.monotonic()
        until = now + (CLOSE_WITH_ALERTS_S if self._pending else CLOSE_S)
        self._diagnosing.deadline = now + DIAGNOSIS_AT_END_S
        self._waiting.release()
        self._alerts.end()
        self._alerts.ended(now + (DIAGNOSIS_AT_END_S + CLOSE_S / 2 if self._pending else CLOSE_S))
        for tracker, outbox in self._trackers:
            outbox.end(tracker.close)
        for _, outbox in self._others:
            outbox.end()
        late = [outbox for outbox in self._outboxes if not outbox.ended(until)]
        if self._webhook is not None:
            self._webhook.hurry()
        self._say_what_is_missing(late)

    @property
    def _pending(self) -> bool:
        return self._asked > self._told

    @property
    def _is_here(self) -> bool:
        """Whether this is no forked child: it has none of the threads, and a lock may be held for ever."""
        return os.getpid() == self._pid

    @property
    def _outboxes(self) -> list[Outbox]:
        return [outbox for _, outbox in self._trackers] + [outbox for _, outbox in self._others]

    def _tell(self, alert: Alert, *, to_all: bool) -> None:
        """On the thread of alerts: has the run diagnosed, then tells."""
        try:
            with Suppressed():
                alert = self._with_diagnosis(alert)
            for tracker, outbox in self._trackers:
                outbox.put(partial(tracker.alert, alert))
            for receive, outbox in self._others if to_all else ():
                outbox.put(partial(receive, alert))
        finally:
            self._told += 1

    def _with_diagnosis(self, alert: Alert) -> Alert:
        until = time.monotonic() + _STEP_S
        while self._newest < alert.step and not self._closing and (left := until - time.monotonic()) > 0:
            self._waiting.acquire(timeout=left)
        self._flush(1.0)
        found = self._diagnosing()
        return alert if found is None else diagnosed(alert, found)

    def _say_what_is_missing(self, late: list[Outbox]) -> None:
        for outbox in self._outboxes:
            if outbox in late:
                self._notice(f"{outbox.name} did not end in time, and was left behind")
            elif outbox.left_out:
                self._notice(f"{outbox.name} is slower than the training; {outbox.left_out:,} calls were left out")
