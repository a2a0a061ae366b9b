"""Examined incidents: repeats of one origin are made one incident, with the remedies that all of them speak for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Reason
from ampscope.analysis.cures.advised_diffs import with_diffs
from ampscope.analysis.cures.explicit_half import ExplicitHalf
from ampscope.analysis.cures.own_words import Program
from ampscope.analysis.cures.remedies import is_tried_by_replays, remedies, why_untried
from ampscope.analysis.results import Incident, Remedy
from ampscope.analysis.usage.loop_edits import clipped
from ampscope.cures.rewriting.program import half
from ampscope.trace.schema import Change, Form, Trigger
from ampscope.trace.vocabulary import Cause

_UNKNOWN = Program()
_KEEP_WIDE = Remedy(
    text="Keep what the loop carries from step to step in float32; cast it where it is used.",
    code="state = state.float()",
    kind=Change.FP32,
    untried="what made it could not be run again",
)
_COMPUTE_WIDE = Remedy(
    text="Compute in float32 what the model is called with, and cast it at the call.",
    code="ratio = (height.float() * width.float()).sqrt()  # an example",
    kind=Change.FP32,
    untried=_KEEP_WIDE.untried,
)


class Examined(NamedTuple):
    """An incident, with what its remedies are made from."""

    incident: Incident
    reason: Reason = NOTHING_MORE
    explicit: ExplicitHalf = ExplicitHalf()
    leaves: frozenset[str] = frozenset()  #: buffers and carried tensors that the step was the first to leave not finite
    #: what it left of the model's own state was so when the run ended, whether it was read or not
    remains: bool = False
    matters: bool = True  #: whether it is one though no other incident comes of it
    wide: bool | None = None  #: what it left is finite where the same calls ran in float32; None: not tried
    steps: frozenset[int] = frozenset()  #: of all its occurrences, where there is more than one

    @property
    def key(self) -> tuple[Any, ...]:
        """The key by which two incidents count as one."""
        incident = self.incident
        if incident.cause.is_benign:
            return (incident.cause,)
        if incident.written_by is not None:
            return (incident.written_by.step,)
        place = (incident.source.file, incident.source.line) if incident.source else None
        return (incident.cause, incident.op, incident.module, incident.phase, place)

    def repeated(self, step: int) -> Examined:
        """The same at another step, at which nothing was tried."""
        incident = replace(self.incident, step=step, last_step=step, tried=())
        return self._replace(incident=incident, leaves=frozenset())

    def joined(self, later: Sequence[Incident]) -> Examined:
        """With all further occurrences counted in, in the order of their steps."""
        if not later:
            return self
        incident = self.incident
        all_ = (incident, *later)
        steps = self._all_steps.union(each.step for each in later)  # optimizers count their own: two may fail at one
        joined = replace(
            incident,
            last_step=later[-1].step,
            count=len(steps),
            fp32_ok=next((each.fp32_ok for each in all_ if each.fp32_ok is not None), None),
            tried=tuple(chain.from_iterable(each.tried for each in all_)),
            received_by=tuple(sorted(set(chain.from_iterable(each.received_by for each in all_)))),
        )
        return self._replace(incident=joined, steps=steps)

    def received_by(self, ranks: tuple[int, ...]) -> Examined:
        """The same, with the ranks that it was received by."""
        if self.incident.received_by == ranks:  # of a run that goes on with NaN there are a hundred thousand
            return self
        return self._replace(incident=replace(self.incident, received_by=ranks))

    def on_rank(self, rank: int) -> Examined:
        """The same on another rank, on which nothing was tried."""
        if (self.incident.rank, self.incident.tried) == (rank, ()):
            return self
        return self._replace(incident=replace(self.incident, rank=rank, tried=()))

    @property
    def _all_steps(self) -> frozenset[int]:
        return self.steps or frozenset({self.incident.step})

    def joined_by_rank(self, same: Examined) -> Examined:
        """With the same failure of another rank."""
        incident, other = self.incident, same.incident
        steps = self._all_steps | same._all_steps
        both = {incident.rank, *incident.also_on, other.rank, *other.also_on}
        joined = replace(
            incident,
            last_step=max(incident.last_step, other.last_step),
            count=max(incident.count, other.count, len(steps)),
            fp32_ok=incident.fp32_ok if incident.fp32_ok is not None else other.fp32_ok,
            tried=(*incident.tried, *other.tried),
            also_on=tuple(sorted(both - {incident.rank})),
            received_by=tuple(sorted({*incident.received_by, *other.received_by} - both)),
        )
        return self._replace(incident=joined, steps=steps)

    def with_remedies(self, program: Program) -> Incident:
        """The incident with what cures it; some of it belongs to other lines of the program."""
        incident = self.incident
        if incident.cause.is_benign:
            return incident
        advice = remedies(
            incident.cause,
            op=incident.op,
            module=incident.module,
            reason=self.reason,
            explicit=self.explicit,
            tried=incident.tried,
            program=program,
        )
        if incident.cause is Cause.FP16_OVERFLOW and incident.trigger == Trigger.NONFINITE_CARRIED:
            advice = (replace(_KEEP_WIDE, verified=self.wide), *advice)
        elif incident.cause is Cause.FP16_OVERFLOW and self.wide is not None:
            advice = (replace(_COMPUTE_WIDE, verified=self.wide), *advice)
        why = why_untried(incident)
        told = [replace(each, untried=why) if why and is_tried_by_replays(each) else each for each in advice]
        told = sorted(told, key=lambda remedy: remedy.verified is False)
        written = with_diffs(told, incident, self.reason, program)
        return replace(incident, remedies=tuple(_clipped(each, incident, program) for each in written))


def _clipped(remedy: Remedy, incident: Incident, program: Program) -> Remedy:
    """With the gradients clipped in the loop, where a replay has shown that it helps."""
    forms = [each.form for each in incident.tried if each.form is not None and each.form.form == Form.CLIPPED]
    norms = {form.value for form in forms if form.value is not None}
    lines, watched = program.called_from, program.watched_at
    if remedy.kind != Form.CLIPPED or not remedy.verified or len(norms) != 1 or len(lines) != 1 or watched is None:
        return remedy
    return replace(remedy, diff=clipped(lines[0], half.watched(watched), norms.pop()))


def merged(examined: Iterable[Examined], program: Program = _UNKNOWN) -> list[Incident]:
    """Repeats of one origin as one incident with count and span, in the order of their steps, with their remedies.

    The first keeps its details; what was tried on any of them counts for all. The same on several ranks is one, too.
    """
    of_rank: dict[tuple[Any, ...], list[Examined]] = {}
    for each in sorted(examined, key=lambda each: each.incident.step):
        of_rank.setdefault((each.incident.rank, *each.key), []).append(each)
    joined = [first.joined([each.incident for each in later]) for first, *later in of_rank.values()]
    kept: dict[tuple[Any, ...], Examined] = {}
    for each in sorted(joined, key=lambda each: (each.incident.step, each.incident.rank)):
        first = kept.get(each.key)
        kept[each.key] = first.joined_by_rank(each) if first else each
    return [each.with_remedies(program) for each in kept.values()]
