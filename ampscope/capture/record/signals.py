"""`Signals` tells others of a run while it trains: alerts and live figures, in which order, and for how long."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ampscope.capture.record.alerts import Alert, Diagnosing, RateLimit, diagnosed
from ampscope.capture.record.outbox import Outbox
from ampscope.capture.record.webhook import Webhook
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.errors import WatchError
from ampscope.trace.schema import StepRow
from ampscope.trace.write.writer import TraceWriter


@runtime_checkable
class Tracker(Protocol):
    """A destination for a run's figures and alerts, besides its trace.

    Its methods are called one after the other, all on one thread that belongs to the tracker alone, never on the
    training's. One that raises, or does not return, switches the tracker off; nobody waits for it.

    Attributes:
        every: Figures are sent at one step in this many.
    """

    every: int

    def begin(self, run: Path) -> None:
        """Called first: makes the client, where the user has not given one.

        Args:
            run: The run's folder.
        """

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of a step.

        Args:
            step: Its number.
            figures: By name, as ``ampscope/loss_scale``; only those that are known and finite.
        """

    def alert(self, alert: Alert) -> None:
        """Something needs a look."""

    def close(self) -> None:
        """Called last: writes what waits, and closes a client that the tracker has made itself."""


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


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """Holds the figures known so far of this process's steps.

    Every value is on the host already: reading them waits for no device, so the latest steps of an accelerator may not
    be among them yet.
    """

    steps: int  #: attempts at a step, skipped ones too
    skipped_share: float | None  #: of the attempts through a scaler, the share that it skipped; None without a scaler
    scale: float | None  #: the latest loss scale; None without a scaler
    observing_share: float  #: AMPscope's own time, as a share of all steps' time
    grad_norm: float | None = None  #: L2 norm of the latest unscaled gradients, before clipping
    headroom_bits: float | None = None  #: factors of two up to overflow, of the value that came closest to it in the
    #: newest step that was traced, of those that have moved since the one before; None before two were

    def by_name(self) -> dict[str, float]:
        """The figures under the names that they have in logs; only those that this run has, and that are finite."""
        known = {
            "ampscope/loss_scale": self.scale,
            "ampscope/grad_norm": self.grad_norm,
            "ampscope/skipped_share": self.skipped_share,
            "ampscope/headroom_bits": self.headroom_bits,
            "ampscope/observing_share": self.observing_share,
        }
        return {name: value for name, value in known.items() if value is not None and math.isfinite(value)}


class FigureKeeper:
    """Adds up the rows of steps.

    Args:
        signals: Told of each step of the first optimizer; None where nobody is to be told.

    Attributes:
        headroom_bits: See `LiveFigures`.
    """

    def __init__(self, signals: Signals | None = None) -> None:
        self._signals = signals
        self._steps = 0
        self._scaled = 0  # steps through a scaler
        self._skipped = 0
        self._scale: float | None = None
        self._grad_norm: float | None = None
        self.headroom_bits: float | None = None
        self._seconds = 0.0
        self._observing = 0.0

    def step(self, row: StepRow) -> None:
        """The row of a step is written."""
        self._steps += 1
        self._seconds += row.duration_s
        self._observing += row.observing_s
        if row.found_inf is not None:
            self._scaled += 1
            self._skipped += row.skipped
        if row.scale is not None:
            self._scale = row.scale
        self._grad_norm = row.grad_norm
        if self._signals is not None and row.optimizer == 0:
            self._signals.step(row.step, self.now.by_name)

    @property
    def now(self) -> LiveFigures:
        """The figures so far."""
        return LiveFigures(
            self._steps,
            self._skipped / self._scaled if self._scaled else None,
            self._scale,
            self._observing / self._seconds if self._seconds else 0.0,
            self._grad_norm,
            self.headroom_bits,
        )
