"""Bad steps over all ranks: on which of them the value was born, and which only received it.

Ranks that train together exchange gradients, so what is not finite on one of them is a moment later not finite on all.
A rank's own part in that is known from what it recorded alone: its loss, which is computed before anything is
exchanged, and its replay, which exchanges nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby, starmap
from typing import NamedTuple

from ampscope.analysis.tables.lazy_tables import collect_rows, remembered
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ReplayStatus, Table, Trigger


class RankSteps(NamedTuple):
    """The steps that one rank recorded; null means not recorded."""

    rank: int
    steps: int  #: how many attempts
    first: int
    last: int
    skipped: int
    bad_losses: int  #: steps whose loss was recorded as not finite
    loss: float | None  #: mean over the steps at which it was finite
    last_loss: float | None
    seconds: float | None  #: mean duration of a step


_FINITE = "CASE WHEN isfinite(loss) THEN loss END"
_SUMS = (
    f"rank, count(*), min(step), max(step), count_if(skipped), count(loss) - count({_FINITE}), avg({_FINITE}), "
    "arg_max(loss, step), avg(duration_s)"
)


@remembered(Table.STEPS)
def steps_by_rank(run: Run) -> dict[int, RankSteps]:
    """Returns the recorded steps of each rank; ranks without a step are left out."""
    return {row[0]: RankSteps(*row) for row in collect_rows(run.table(Table.STEPS), _SUMS, "rank")}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a run."""

    size: int = 1  #: how many train together
    present: tuple[int, ...] = (0,)  #: those that have written, ascending

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one."""
        return self.size > 1

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of which nothing is in the trace."""
        here = set(self.present)
        return tuple(rank for rank in range(self.size) if rank not in here)


def world_of(run: Run) -> World:
    """The ranks of ``run``; one of a run that has none yet."""
    present = tuple(run.ranks) or (0,)
    return World(size=max(run.manifest.world_size, present[-1] + 1), present=present)


def sampled_rank(run: Run, world: World) -> int:
    """The rank to ask what all of them do alike: the first whose steps were traced, else the first that made any."""
    traced = next((rank for rank in world.present if run.stamp(Table.OPS, rank=rank)), None)
    return min(steps_by_rank(run), default=world.present[0]) if traced is None else traced


class RankPart(Enum):
    """A rank's part in a bad step."""

    OWN = auto()  #: its own calculation was not finite
    RECEIVED = auto()  #: its own calculation was finite
    UNCLEAR = auto()  #: nothing recorded tells


class Sighting(NamedTuple):
    """A step that was not finite on one rank: an incident that it recorded, or no more than its loss."""

    step: int
    optimizer: int
    rank: int
    trigger: str  #: `Trigger`
    replay: str  #: `ReplayStatus`
    loss: float | None
    over_budget: bool = False
    recorded: bool = True  #: whether there is an incident row
    symptom: int = 0  #: the same number: the same trigger, and the same parameters were not finite
    lost_in_reduction: bool = False  #: its own gradients were finite, and too large for the dtype that they are sent in

    @property
    def has_bad_loss(self) -> bool:
        """Whether its own loss was not finite."""
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def part(self) -> RankPart:
        """The rank's part in the bad step, as its own record says."""
        if self.lost_in_reduction:
            return RankPart.OWN
        if self.replay == ReplayStatus.RECEIVED:
            return RankPart.RECEIVED
        if self.has_bad_loss or self.replay in (ReplayStatus.EXACT, ReplayStatus.DIVERGED):
            return RankPart.OWN
        if self.replay == ReplayStatus.NOT_REPRODUCED:
            return RankPart.RECEIVED
        return RankPart.UNCLEAR if self.trigger == Trigger.NONFINITE_GRADIENT else RankPart.OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class BadAttempt:
    """One attempt of one optimizer that was not finite on at least one rank."""

    step: int
    optimizer: int
    origins: tuple[Sighting, ...] = ()  #: ranks whose own calculation failed; else those that nothing clears
    received: tuple[Sighting, ...] = ()  #: ranks that are cleared by their own record
    unheard: tuple[int, ...] = ()  #: ranks that recorded neither this step nor one after it
    since: int | None = None  #: the step whose bad gradients the optimizer wrote, where all from there on are bad


def bad_steps(
    sightings: Iterable[Sighting],
    last_step: Mapping[int, int],
    size: int,
    written: Collection[tuple[int, int]] = frozenset(),
) -> list[BadAttempt]:
    """The bad steps in order, each with the ranks that it began on.

    Args:
        sightings: What was seen, on all ranks.
        last_step: The newest step that each rank recorded.
        size: How many ranks train together; of one alone nothing was received.
        written: Optimizer and step of those whose bad gradients the optimizer wrote into the weights.
    """
    ordered = sorted(sightings, key=lambda one: (one.step, one.optimizer, one.rank))
    grouped = groupby(ordered, key=lambda one: (one.step, one.optimizer))
    if size == 1:
        found = [BadAttempt(step=step, optimizer=number, origins=tuple(all_)) for (step, number), all_ in grouped]
    else:
        found = [_judged(step, number, list(all_), last_step, size) for (step, number), all_ in grouped]
    return list(_with_what_began_it(found, written))


def _with_what_began_it(steps: Iterable[BadAttempt], written: Collection[tuple[int, int]]) -> Iterator[BadAttempt]:
    """Each step with the one since which the weights are bad: that was written, and no good step came in between.

    A step that was skipped leaves them as they were.
    """
    before: dict[int, BadAttempt] = {}
    for each in steps:
        last = before.get(each.optimizer)
        follows = last is not None and last.step == each.step - 1
        began = last.step if last is not None and (each.optimizer, last.step) in written else None
        since = (began if last.since is None else last.since) if last is not None and follows else None
        before[each.optimizer] = replace(each, since=since)
        yield before[each.optimizer]


def _judged(step: int, optimizer: int, seen: Sequence[Sighting], last_step: Mapping[int, int], size: int) -> BadAttempt:
    own = [one for one in seen if one.part is RankPart.OWN]
    unclear = [one for one in seen if one.part is RankPart.UNCLEAR]
    cleared = [one for one in seen if one.part is RankPart.RECEIVED]
    heard = {one.rank for one in seen}
    unheard = tuple(rank for rank in range(size) if rank not in heard and last_step.get(rank, -1) < step)
    if own:  # a rank of which nothing is known got what the others had in any case
        received = sorted([*cleared, *unclear], key=lambda one: one.rank)
        return BadAttempt(step=step, optimizer=optimizer, origins=tuple(own), received=tuple(received), unheard=unheard)
    if not unclear and _stands_alone(cleared, unheard):
        return BadAttempt(step=step, optimizer=optimizer, origins=tuple(cleared))
    return BadAttempt(step=step, optimizer=optimizer, origins=tuple(unclear), received=tuple(cleared), unheard=unheard)


def _stands_alone(cleared: Sequence[Sighting], unheard: Sequence[int]) -> bool:
    """Whether one rank alone went wrong, though all others are known: then nobody can have sent it the value."""
    ranks = {one.rank for one in cleared}
    return len(ranks) == 1 and not unheard and all(one.replay != ReplayStatus.RECEIVED for one in cleared)


#: Sightings that are read, the first first: a job of many ranks that goes on with NaN has millions.
MOST = 100_000
#: Losses without an incident that are told, of each rank and optimizer.
MOST_UNREPORTED = 60

_INCIDENT = (
    'step, optimizer, rank, "trigger", replay, loss, over_budget, true, hash("trigger", bad_params), '
    """contains(evidence, '"overflows": true')"""
)
#: Of the cast value, or the engine would leave out parts by their bounds, which say nothing of NaN.
_BAD_LOSS = "NOT isfinite(try_cast(loss AS FLOAT))"


@remembered(Table.INCIDENTS, Table.STEPS)
def sightings(run: Run) -> list[Sighting]:
    """Everything that was seen to go wrong, by step; of one step by rank, and in the order of its time."""
    rows = collect_rows(run.table(Table.INCIDENTS), _INCIDENT, order="step, optimizer, rank, time", limit=MOST)
    numbers: dict[int, int] = {}
    recorded = [one._replace(symptom=numbers.setdefault(one.symptom, len(numbers))) for one in starmap(Sighting, rows)]
    return sorted([*recorded, *_unreported(run, recorded)], key=lambda one: (one.step, one.optimizer, one.rank))


def _unreported(run: Run, recorded: list[Sighting]) -> Iterator[Sighting]:
    """Steps whose loss was not finite although capture reported nothing (its replay may have been off)."""
    told = Counter(one.rank for one in recorded if one.has_bad_loss)
    if all(steps.bad_losses <= told[rank] for rank, steps in steps_by_rank(run).items()):
        return
    columns = "step, optimizer, rank, loss"
    bad = collect_rows(run.table(Table.STEPS), columns, where=_BAD_LOSS, order=columns, limit=MOST)
    known = {(one.step, one.optimizer, one.rank) for one in recorded}
    found: Counter[tuple[int, int]] = Counter()
    for step, optimizer, rank, loss in bad:
        if (step, optimizer, rank) not in known and found[optimizer, rank] < MOST_UNREPORTED:
            found[optimizer, rank] += 1
            seen = Trigger.NONFINITE_LOSS, ReplayStatus.UNAVAILABLE
            yield Sighting(step, optimizer, rank, *seen, loss, recorded=False)


#: Of the cast value, or the engine would leave out parts by their bounds, which say nothing of NaN.
_WRITTEN = "NOT skipped AND NOT isfinite(try_cast(coalesce(clipped_grad_norm, grad_norm) AS FLOAT))"


@remembered(Table.STEPS)
def written_steps(run: Run) -> frozenset[tuple[int, int]]:
    """Optimizer and step of each attempt that went through with gradients that were not finite, on any rank."""
    keys = "optimizer, step"
    rows = collect_rows(run.table(Table.STEPS), keys, keys, where=_WRITTEN, order="step, optimizer", limit=MOST)
    return frozenset((optimizer, step) for optimizer, step in rows)
