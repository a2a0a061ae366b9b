"""Decides which steps are traced and which incidents replayed, so that observing stays within its share of the time."""

from __future__ import annotations

import math
import time

from ampscope.trace.vocabulary import FORGOTTEN_AFTER

#: Faults of a new set-up mostly show at once: the first steps are traced, and kept only if something is born there.
EARLY_STEPS = 8
#: Later, by default, a step is traced at 8, 16, 32, ..., and then one in this many.
INTERVAL = 1000
#: Where a value grows or is near overflow, steps are traced sooner: so often until it would get there,
LOOKS_AHEAD = 8
#: but at most this many times while the number of steps doubles, about, and not within as many steps as are traced at
#: the start twice over.
PER_DOUBLING = 4
#: Of the steps that ``every=N`` asks for, those that are at least this many steps apart have every statistic that is
#: taken of healthy steps.
FULL_EVERY = 16
#: Steps traced as they run after an incident whose replay showed nothing.
ARMED_STEPS = 5
#: Replays are free up to this many seconds, then limited to their share of the run's time.
FREE_REPLAY_SECONDS = 2.0
#: Incidents that are replayed whatever it costs; then the first of another kind.
ALWAYS_REPLAYED = 3
#: Replays of one failure in the free seconds; a search for its cure goes on from one to the next.
SAME_FAILURE = 5
#: Times that steps are traced as they run after an incident, whatever it costs.
ALWAYS_ARMED = 3
#: Counterfactual replays per incident.
TRIALS = 3
#: More of them for what is promising, while replays are within their free seconds or their share: other forms of a
#: failed call, more modules where one has moved the failure.
PROMISING_TRIALS = 3
#: The same, at least, where a cure that is found is done to the training.
HEALING_TRIALS = 10


class TraceBudget:
    """Decides which steps are traced.

    Args:
        every: Trace one step in this many; 0 for none; None for the default, which widens itself.
        share: Share of the time that tracing may take in default mode.
        sampled: Whether healthy steps of this rank are wanted at all; the first steps and those after an incident are
            traced all the same, to see what goes wrong.
    """

    def __init__(self, every: int | None, share: float, *, sampled: bool = True) -> None:
        self._every = every if sampled or every == 0 else None
        self._sampled = sampled
        self._share = share
        self._last, self._next = EARLY_STEPS // 2, EARLY_STEPS  # samples; the last as if there had been one between
        self._steps_left = math.inf
        self._armed = 0
        self._armings = 0
        self._taken = 0
        self._plain_seconds = 0.0  # a recent untraced step
        self._extra_seconds = 0.0
        self._started = time.perf_counter()

    def change(self, *, every: int | None, share: float) -> None:
        """Replaces the constructor's arguments of these names, from the next step on."""
        self._every, self._share = every if self._sampled or every == 0 else None, share

    def wants(self, step: int) -> bool:
        """Whether to trace step number ``step`` of this process."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        self._armed = max(0, self._armed - 1)
        return step < EARLY_STEPS or self._due(step) or self._armed > 0

    def arm(self) -> None:
        """Traces the next steps as they run, if that can be afforded: a replay could not show what went wrong."""
        if self._armings < ALWAYS_ARMED or self._within_share():
            self._armings += 1
            self._armed = ARMED_STEPS + 1

    def keeps(self, step: int) -> bool:
        """Whether a traced step is written even though nothing was born in it."""
        return self._every is not None or self._due(step) or (self._sampled and self._taken == 0)

    def keeps_replay(self, step: int) -> bool:
        """Whether to write a step that cannot be traced as it runs: its replay takes many times as long."""
        rare = self._every is not None or step >= INTERVAL or self._taken == 0
        return rare and self.wants(step) and self.keeps(step)

    def is_full(self, step: int) -> bool:
        """Whether a traced step, if it is a healthy one, has every statistic that is taken of any."""
        every = self._every
        return step // every % -(-FULL_EVERY // every) == 0 if every else self.keeps(step)

    def kept(self, *, steps_left: float = math.inf) -> None:
        """A healthy step was written.

        Args:
            steps_left: Until its fastest growing value overflows, if it goes on as since the sample before.
        """
        self._taken += 1
        self._steps_left = steps_left

    def took(self, step: int, seconds: float, *, traced: bool) -> None:
        """A step's duration; from the difference to untraced ones the interval follows."""
        if not traced:
            self._plain_seconds = seconds
            return
        self._extra_seconds += max(0.0, seconds - self._plain_seconds) if self._plain_seconds else 0.0
        if step >= self._next:
            self._last, self._next = step, step + self._until_next(step)

    def _until_next(self, step: int) -> int:
        """Steps from one sample to the next. Within the first thousand they do not depend on how long anything took."""
        if step >= INTERVAL and not self._within_share():
            return 2 * max(step - self._last, INTERVAL)
        calm = min(2 * (step - self._last), INTERVAL)
        least = max(2 * EARLY_STEPS, step // PER_DOUBLING)
        return math.floor(min(calm, max(least, self._steps_left / LOOKS_AHEAD)))

    def _due(self, step: int) -> bool:
        return self._sampled and step >= self._next

    def _within_share(self) -> bool:
        known = self._plain_seconds > 0.0  # until an untraced step was seen, nobody knows what tracing costs
        return known and self._extra_seconds <= self._share * (time.perf_counter() - self._started)


class ReplayBudget:
    """Decides which incidents are replayed, and how many changes are tried on each.

    Args:
        share: Share of the run's time that replays may take after the free seconds.
        trials: Counterfactual replays per incident.
        heals: What is found out helps the run itself: a failure that stays is replayed once, whatever it costs.
    """

    def __init__(self, share: float, trials: int, *, heals: bool = False) -> None:
        self._share = share
        self._trials = trials
        self._heals = heals
        self._whatever_it_costs = (
            False  # the present incident is replayed because it stays, or is the first of its kind
        )
        self._kinds: set[object] = set()  # of those that were replayed
        self._spent = 0.0
        self._before = 0.0  # spent before the present incident
        self._incidents = 0
        self._last = 0.0
        #: Failure -> how often it was replayed, how often not or only because it stays, and the latest step.
        self._replayed: dict[object, tuple[int, int, int]] = {}
        self._started = time.perf_counter()

    def allows(self, failure: object, step: int, kind: object = None) -> bool:
        """Whether another incident's replay fits; if so, it counts as begun.

        Args:
            failure: What was bad. One that keeps coming back has its share of the time, but not of the free seconds:
                those are for what has not been looked at yet.
            step: When.
            kind: What became bad by it: a loss, gradients. The first of each kind is replayed whatever it costs: what a
                scale takes to find its place may have used up all before a loss fails.
        """
        self._replayed = {key: past for key, past in self._replayed.items() if step - past[-1] <= FORGOTTEN_AFTER}
        often, missed, _ = self._replayed.get(failure, (0, 0, step))
        stays = self._heals and missed == 1
        self._whatever_it_costs = stays or kind not in self._kinds
        free = FREE_REPLAY_SECONDS if often < SAME_FAILURE else 0.0
        fits = self._incidents < ALWAYS_REPLAYED or self._whatever_it_costs or self._within_share(free)
        self._incidents += fits
        self._kinds |= {kind}
        self._replayed[failure] = often + fits, missed + (stays or not fits), step
        self._before = self._spent
        return fits

    def allows_look(self, *, whatever_it_costs: bool = False) -> bool:
        """Whether a step that is only suspicious may be run again; such looks take nothing from the incidents.

        Args:
            whatever_it_costs: One of the few first looks of their kind, which are made where any are.
        """
        return self._trials > 0 and (whatever_it_costs or self._within_share(FREE_REPLAY_SECONDS))

    def allows_trial(self, tried: int, *, promising: bool = False) -> bool:
        """Whether one more change may be tried on the incident, after ``tried`` of them.

        Args:
            tried: How many were.
            promising: It is another form of the failed call, of which there may be several, or goes on where the one
                before has moved the failure.
        """
        cheap = self._within_share(FREE_REPLAY_SECONDS)
        if tried >= self._trials:
            return promising and cheap and self._trials > 0 and tried < self._trials + PROMISING_TRIALS
        return self._incidents <= ALWAYS_REPLAYED or self._whatever_it_costs or cheap

    def spent(self, seconds: float) -> None:
        """A replay took this long."""
        self._spent += seconds
        self._last = seconds

    def judged(self, seconds: float) -> None:
        """The whole incident took this long, its replays and all that was made of them."""
        self._spent = max(self._spent, self._before + seconds)

    def _within_share(self, free: float) -> bool:
        elapsed = time.perf_counter() - self._started
        return self._spent + self._last <= free + self._share * elapsed


def replays(share: float, trials: int, *, heals: object) -> ReplayBudget:
    """The budget of a run's replays; one that heals may try more, for what is found helps it at once."""
    return ReplayBudget(share, max(trials, HEALING_TRIALS) if heals else trials, heals=bool(heals))
