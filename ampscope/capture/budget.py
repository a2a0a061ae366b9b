"""Decides which steps are traced and which incidents replayed, so that observing stays within its share of the time."""

from __future__ import annotations

import time

#: Faults of a new set-up mostly show at once: the first steps are traced, and kept only if something is born there.
EARLY_STEPS = 8
#: Later, one step in this many is traced by default.
INTERVAL = 1000
#: Steps traced as they run after an incident whose replay showed nothing.
ARMED_STEPS = 5
#: Replays are free up to this many seconds, then limited to their share of the run's time.
FREE_REPLAY_SECONDS = 2.0
#: Incidents that are replayed whatever it costs.
ALWAYS_REPLAYED = 3
#: Counterfactual replays per incident.
TRIALS = 3


class TraceBudget:
    """Which steps to trace.

    Args:
        every: Trace one step in this many; 0 for none; None for the default, which widens itself.
        share: Share of the time that tracing may take in default mode.
    """

    def __init__(self, every: int | None, share: float) -> None:
        self._every = every
        self._share = share
        self._interval = INTERVAL
        self._next = INTERVAL
        self._armed = 0
        self._taken = 0
        self._plain_seconds = 0.0  # a recent untraced step
        self._extra_seconds = 0.0
        self._started = time.perf_counter()

    def wants(self, step: int) -> bool:
        """Whether to trace step number ``step`` of this process."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        self._armed = max(0, self._armed - 1)
        return step < EARLY_STEPS or step >= self._next or self._armed > 0

    def arm(self) -> None:
        """Traces the next steps as they run: a replay could not show what went wrong."""
        self._armed = ARMED_STEPS + 1

    def keeps(self, step: int) -> bool:
        """Whether a traced step is written even though nothing was born in it."""
        return self._every is not None or step >= self._next or self._taken == 0

    def kept(self) -> None:
        """A healthy step was written."""
        self._taken += 1

    def took(self, step: int, seconds: float, *, traced: bool) -> None:
        """A step's duration; from the difference to untraced ones the interval follows."""
        if not traced:
            self._plain_seconds = seconds
            return
        self._extra_seconds += max(0.0, seconds - self._plain_seconds) if self._plain_seconds else 0.0
        if step >= self._next:
            elapsed = time.perf_counter() - self._started
            if self._extra_seconds > self._share * elapsed:
                self._interval *= 2
            self._next = step + self._interval


class ReplayBudget:
    """Which incidents to replay, and how many changes to try on each.

    Args:
        share: Share of the run's time that replays may take after the free seconds.
        trials: Counterfactual replays per incident.
    """

    def __init__(self, share: float, trials: int) -> None:
        self._share = share
        self._trials = trials
        self._spent = 0.0
        self._incidents = 0
        self._last = 0.0
        self._started = time.perf_counter()

    def allows(self) -> bool:
        """Whether another incident's replay fits; if so, it counts as begun."""
        fits = self._incidents < ALWAYS_REPLAYED or self._within_share()
        self._incidents += fits
        return fits

    def allows_trial(self, tried: int) -> bool:
        """Whether one more change may be tried on the incident, after ``tried`` of them."""
        return tried < self._trials and (self._incidents <= ALWAYS_REPLAYED or self._within_share())

    def spent(self, seconds: float) -> None:
        """A replay took this long."""
        self._spent += seconds
        self._last = seconds

    def _within_share(self) -> bool:
        elapsed = time.perf_counter() - self._started
        return self._spent + self._last <= FREE_REPLAY_SECONDS + self._share * elapsed
