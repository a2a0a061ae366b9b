"""The non-finite values of a run that harm nothing, each kind once, with the reason why it is left alone."""

from __future__ import annotations

from collections.abc import Iterable

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.origin.step_graph import Sites, StepGraph, public_phase, source_line
from ampscope.analysis.results import Incident, SourceLine
from ampscope.analysis.tables.traced_steps import first_traced_steps
from ampscope.provenance import Harmless, harmless_births
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Source, execution_of
from ampscope.trace.vocabulary import Cause, Severity

#: Traced steps that are looked through: what is harmless is so in every step.
LOOKED_THROUGH = 3

_CAUSES = {
    Harmless.MASK: Cause.BENIGN_INF_MASK,
    Harmless.SATURATED: Cause.BENIGN_SATURATED,
    Harmless.MASKED: Cause.BENIGN_MASKED_INTERNAL,
    Harmless.UNUSED: Cause.BENIGN_METRIC_NAN,
}


def harmless_values(run: Run, sites: Sites, failures: Iterable[Incident] = ()) -> list[Incident]:
    """Masks, masked values and metrics that are not finite, as incidents of severity ``info``.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        failures: What else is told: a line that is to blame is not harmless when it runs again, as a checkpoint's does.
    """
    found: dict[Cause, Incident] = {}
    blamed = {_place(each) for each in failures if each.severity is not Severity.INFO}
    for each in first_traced_steps(run, rank=sites.rank, count=LOOKED_THROUGH):
        if execution_of(each.source)[0] == Source.REPLAY_FP32:  # what did not happen is nobody's worry
            continue
        graph = StepGraph(run, sites, each.step, each.source)
        for seq, why in harmless_births(graph):
            incident = _incident(graph, seq, _CAUSES[why])
            if _place(incident) not in blamed:
                found.setdefault(incident.cause, incident)
    return list(found.values())


def _place(incident: Incident) -> tuple[str, str, SourceLine | None]:
    return incident.op, incident.module, incident.source


def _incident(graph: StepGraph, seq: int, cause: Cause) -> Incident:
    site = graph.place(seq)
    op = graph.site(seq).op
    return Incident(
        step=graph.step,
        last_step=graph.step,
        severity=CATALOGUE[cause].severity,
        cause=cause,
        phase=public_phase(site.phase),
        op=op,
        module=site.module,
        module_type=site.module_type,
        source=source_line(site),
        inputs=graph.operands(seq),
        outputs=graph.results(seq),
        traced=graph.source,
        explanation=explanation(cause, Occurrence(op=op)),
        rank=graph.rank,
    )
