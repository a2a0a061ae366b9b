"""Examined incidents: repeats of one origin are made one incident, with the remedies that all of them speak for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Reason
from ampscope.analysis.cures.explicit_half import ExplicitHalf
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.results import Incident


class Examined(NamedTuple):
    """An incident, with what its remedies are made from."""

    incident: Incident
    reason: Reason = NOTHING_MORE
    explicit: ExplicitHalf = ExplicitHalf()

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two incidents one."""
        incident = self.incident
        if incident.cause.is_benign:
            return (incident.cause,)
        place = (incident.source.file, incident.source.line) if incident.source else None
        return (incident.cause, incident.op, incident.module, incident.phase, place)

    def repeated(self, step: int) -> Examined:
        """The same at another step, at which nothing was tried."""
        return self._replace(incident=replace(self.incident, step=step, last_step=step, tried=()))

    def joined(self, later: Incident) -> Examined:
        """With another occurrence counted in."""
        incident = self.incident
        known = incident.fp32_ok if incident.fp32_ok is not None else later.fp32_ok
        both = (*incident.tried, *later.tried)
        joined = replace(incident, last_step=later.step, count=incident.count + 1, fp32_ok=known, tried=both)
        return self._replace(incident=joined)

    def with_remedies(self) -> Incident:
        """The incident with what cures it."""
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
        )
        return replace(incident, remedies=advice)


def merged(examined: Iterable[Examined]) -> list[Incident]:
    """Repeats of one origin as one incident with count and span, in the order of their steps, with their remedies.

    The first keeps its details; what was tried on any of them counts for all.
    """
    kept: dict[tuple[Any, ...], Examined] = {}
    for each in sorted(examined, key=lambda each: each.incident.step):
        first = kept.get(each.key)
        kept[each.key] = first.joined(each.incident) if first else each
    return [each.with_remedies() for each in kept.values()]
