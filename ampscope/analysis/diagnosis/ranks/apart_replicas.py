"""Ranks that parted from their replicas, as incidents."""

from __future__ import annotations

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.causes.ranks import Parted
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.overview.ranks.replicas import Apart, Shared, replicas
from ampscope.analysis.results import Incident
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Phase
from ampscope.trace.vocabulary import Cause, Severity


def apart_replicas(run: Run) -> list[Incident]:
    """Each rank that parted; of ranks that all went their own ways, as some training means to, nothing is said."""
    return [_incident(each) for each in replicas(run).apart if not each.for_good]


def _incident(apart: Apart) -> Incident:
    cause = Cause.REPLICA_APART
    undecided = apart.is_split and apart.what is Shared.GRAD_NORM
    reason = Parted(
        what=apart.what,
        step=apart.step,
        steps=apart.steps,
        ranks=apart.ranks,
        others=apart.others,
        value=apart.value,
        expected=apart.expected,
        parameter=apart.parameter,
        agreed_at=apart.agreed_at,
    )
    return Incident(
        step=apart.step,
        last_step=apart.last_step,
        count=apart.steps,
        severity=Severity.WARNING if undecided else CATALOGUE[cause].severity,
        cause=cause,
        phase=Phase.OPTIMIZER,
        explanation=explanation(cause, Occurrence(reason=reason)),
        remedies=remedies(cause, reason=reason),
        rank=apart.ranks[0],
        also_on=apart.ranks[1:],
    )
