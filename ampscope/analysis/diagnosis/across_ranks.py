"""Several ranks together: whose failure it was, and which replicas have parted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.causes.ranks import Apart, Shared
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.diagnosis.bad_state import with_writers
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.diagnosis.examiner import Examiner
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.overview.bad_steps import (
    BadAttempt,
    Sighting,
    World,
    bad_steps,
    sightings,
    steps_by_rank,
    written_steps,
)
from ampscope.analysis.overview.replicas import replicas
from ampscope.analysis.results import Incident, WrittenBy
from ampscope.analysis.tables.step_history import histories
from ampscope.analysis.words import ranks_in_words
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Phase, Trigger
from ampscope.trace.vocabulary import FORGOTTEN_AFTER, Cause, Severity

#: Incidents examined op by op; a run with more is summed up from these.
MAX_EXAMINED = 60
#: Ranks with the same symptom at the same step that are examined; the rest is taken for the same.
_MOST_ALIKE = 3
#: What a step can only have found as it was: a step that began so is not what the next one's is to be blamed on.
_STATE = (Cause.BAD_WEIGHT, Cause.BAD_BUFFER)


def examined_incidents(run: Run, world: World) -> list[Examined]:
    """Every incident of every rank, by its origin; what ranks only received is told with the rank that sent it."""
    examiners = _Examiners(run)
    last = {rank: steps.last for rank, steps in steps_by_rank(run).items()}
    steps = bad_steps(sightings(run), last, world.size, written_steps(run))
    born: dict[tuple[int, int], Incident] = {}
    found: list[Examined] = []
    for bad in steps:
        of_step = [
            _followed(each, bad.since, born.get((bad.optimizer, bad.since or 0)))
            for each in _of_step(bad, examiners, world)
        ]
        if of_step:
            born[bad.optimizer, bad.step] = of_step[0].incident
        found += of_step
    return with_writers(found)


class _Examiners:
    """One examiner a rank, made when the first of its incidents is looked at; counts what was looked at."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_rank: dict[int, Examiner] = {}
        self._known: dict[tuple[int, str, int, int | None], Examined] = {}
        self._seen: dict[tuple[int, str, int, int | None], int] = {}  # the latest step of each
        self._examined = 0

    def of_step(self, bad: BadAttempt) -> Iterator[tuple[Sighting, list[Examined]]]:
        """Yields each rank's incidents at one bad step; very many like ones are summed up from a few."""
        alike: dict[tuple[int, str, int, int | None], int] = {}
        for one in bad.origins:
            symptom = (one.optimizer, one.trigger, one.symptom, bad.since)
            alike[symptom] = alike.get(symptom, 0) + 1
            known = self._known.get(symptom)
            goes_on = one.over_budget and one.step - self._seen.get(symptom, one.step) <= FORGOTTEN_AFTER
            spent = self._examined >= MAX_EXAMINED or goes_on or alike[symptom] > _MOST_ALIKE
            self._seen[symptom] = one.step
            if not one.recorded:
                yield one, self._of_rank(one.rank).examined(one)
            elif known is not None and spent:
                yield one, [known.repeated(one.step).on_rank(one.rank)]
            elif self._examined < MAX_EXAMINED:
                found = self._of_rank(one.rank).examined(one)
                self._known[symptom] = found[0]
                self._examined += 1
                yield one, found

    def not_from_here(self, seen: Sighting, why: str) -> Examined:
        """Returns the incident of a bad step that began on no rank of which anything is known."""
        return self._of_rank(seen.rank).not_from_here(seen, why)

    def _of_rank(self, rank: int) -> Examiner:
        if rank not in self._by_rank:
            self._by_rank[rank] = Examiner(self._run, rank, histories(self._run, rank))
        return self._by_rank[rank]


def _of_step(bad: BadAttempt, examiners: _Examiners, world: World) -> Iterator[Examined]:
    if not bad.origins:
        yield examiners.not_from_here(bad.received[0], _elsewhere(bad, world))
        return
    found = list(examiners.of_step(bad))
    is_located = any(_is_located(each) for _, each in found)
    cleared = [one for one, each in found if is_located and not _is_located(each) and _may_be_received(one, each)]
    received = tuple(sorted({one.rank for one in (*bad.received, *cleared)}))
    for one, each in found:
        if one not in cleared:
            yield from (other.received_by(received) for other in each)


def _followed(examined: Examined, since: int | None, first: Incident | None) -> Examined:
    """Turns an incident after weights went bad into a consequence of that, unless it names an op of its own.

    Args:
        examined: What was found.
        since: The step whose bad gradients the optimizer wrote; None where there is none.
        first: What was found at that step.
    """
    incident = examined.incident
    brought = incident.cause in _STATE
    if since is not None and brought and first is not None and first.cause in _STATE:
        return examined._replace(incident=replace(first, step=incident.step, last_step=incident.step, tried=()))
    if since is None or not (brought or incident.cause is Cause.RECEIVED or not incident.op):
        return examined
    what = f"{incident.explanation} It is so" if brought else "The weights are most likely not finite"
    why = f"{what} since step {since:,}: its gradients were not finite, and the optimizer took them."
    wrote = WrittenBy(step=since)
    if first is not None:
        wrote = replace(wrote, op=first.op, module=first.module, source=first.source)
    return examined._replace(incident=replace(incident, explanation=why, written_by=wrote, received_by=()))


def _is_located(examined: Sequence[Examined]) -> bool:
    """Whether an op of this rank's own was found; one that received the value from another rank is none."""
    return any(each.incident.op and each.incident.cause != Cause.RECEIVED for each in examined)


def _may_be_received(one: Sighting, examined: Sequence[Examined]) -> bool:
    """Whether all that was recorded fits a rank that only got the value: a collective that brought it, or no origin."""
    if any(each.incident.cause == Cause.RECEIVED for each in examined):
        return True
    by_itself = one.has_bad_loss or one.lost_in_reduction
    return one.trigger == Trigger.NONFINITE_GRADIENT and not by_itself


def _elsewhere(bad: BadAttempt, world: World) -> str:
    cleared = ranks_in_words([one.rank for one in bad.received])
    came_out = f"what {cleared} of {world.size:,} computed came out finite when it was run again"
    if bad.unheard:
        who = ranks_in_words(bad.unheard)
        which = "which is" if len(bad.unheard) == 1 else "one of those that are"
        return f"{came_out}, so the value came from another rank, {which} not in this trace at that step: {who}"
    return (
        f"{came_out}, and no other rank recorded an incident at that step. The value came in where the ranks' "
        "gradients were joined (a sum of theirs that overflowed, as in a reduction in half precision), or by a fault "
        "that does not repeat"
    )


def apart_replicas(run: Run) -> list[Incident]:
    """Each rank that parted; of ranks that all went their own ways, as some training means to, nothing is said."""
    return [_incident(each) for each in replicas(run).apart if not each.for_good]


def _incident(apart: Apart) -> Incident:
    cause = Cause.REPLICA_APART
    undecided = apart.is_split and apart.what is Shared.GRAD_NORM
    incident = incident_at(cause, apart.step, Phase.OPTIMIZER, told=Occurrence(reason=apart), rank=apart.ranks[0])
    return replace(
        incident,
        last_step=apart.last_step,
        count=apart.steps,
        severity=Severity.WARNING if undecided else incident.severity,
        remedies=remedies(cause, reason=apart),
        also_on=apart.ranks[1:],
    )
