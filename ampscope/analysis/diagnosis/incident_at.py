"""Every incident is made here: of its cause, the op at which it shows, and the row that recorded it."""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.results import Incident, SourceLine
from ampscope.analysis.step_graph import StepGraph, public_phase
from ampscope.trace.schema import IncidentRow, SiteRow
from ampscope.trace.vocabulary import Cause

_NOTHING_SEEN = Occurrence()


def incident_at(
    cause: Cause,
    step: int,
    phase: str = "",
    *,
    told: Occurrence = _NOTHING_SEEN,
    row: IncidentRow | None = None,
    graph: StepGraph | None = None,
    seq: int | None = None,
    site: SiteRow | None = None,
    rank: int = 0,
) -> Incident:
    """Returns the incident of a cause; what else is known of it, a caller puts in with ``dataclasses.replace``.

    Args:
        cause: The cause, which says how severe it is and explains it.
        step: The step.
        phase: A `Phase`; by default that of the op.
        told: What its sentence tells of; the op and the module that it names go before those of ``seq``.
        row: What recorded it; None for what is read from the steps alone.
        graph: The traced step that shows it, of whose rank it then is.
        seq: The op of that step at which it shows, with its operands and results; None where it shows at none.
        site: The program point to show for the op, by default its own.
        rank: The rank that it is of, where there is no traced step.
    """
    if graph is not None and seq is not None:
        site = site or graph.site(seq)
        told = replace(told, op=told.op or graph.site(seq).op, module=told.module or site.module)
    incident = Incident(
        step=step,
        last_step=step,
        severity=CATALOGUE[cause].severity,
        cause=cause,
        phase=public_phase(phase or (site.phase if site is not None else "")),
        op=told.op,
        module=told.module,
        explanation=explanation(cause, told),
        rank=graph.rank if graph is not None else rank,
    )
    if row is not None:
        incident = replace(
            incident, replay=row.replay, replay_reason=row.replay_reason, trigger=row.trigger, tripped=row.bad_params
        )
    if graph is None or seq is None or site is None:
        return incident
    return replace(
        incident,
        module_type=graph.module_type(site) if told.module == site.module else graph.type_of(told.module),
        source=SourceLine.of(site),
        inputs=graph.operands(seq),
        outputs=graph.results(seq),
        path=graph.path((seq,)),
        traced=graph.source,
    )
