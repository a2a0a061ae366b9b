"""A step that lost something to half precision, gradients or the difference of values: the op, and the cause."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.analysis.causes.range_underflow import GradientLost, ValuesLost
from ampscope.analysis.causes.recognition import Recognised
from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.provenance import HowLost, Loss, Origin, lost_mass
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run
from ampscope.trace.schema import IncidentRow, Phase, SiteRow, Source, source_of
from ampscope.trace.vocabulary import Cause


class LostGradient(NamedTuple):
    """Where a step lost its gradients, and why."""

    graph: StepGraph
    origin: Origin
    found: Recognised


def lost_gradient(run: Run, sites: Sites, row: IncidentRow) -> LostGradient | None:
    """The origin of an incident of lost gradients; None where the trace does not show it.

    Args:
        run: The run.
        sites: The sites of the incident's rank.
        row: The incident.
    """
    half = StepGraph(run, sites, row.step, source_of(Source.REPLAY, row.optimizer))
    wide = StepGraph(run, sites, row.step, source_of(Source.REPLAY_FP32, row.optimizer))
    loss = lost_mass(half, wide, row.bad_params)
    if loss is None:
        return None
    site = half.site(loss.origin.seq)
    phase = Phase.FORWARD if site.phase in (Phase.LOSS, Phase.RECOMPUTE) else Phase(site.phase)
    dtype = _dtype(site)
    flushed = loss.how is HowLost.FLUSHED and dtype == "float16"
    cause = Cause.FP16_UNDERFLOW if flushed else Cause.STAGNATION
    return LostGradient(half, loss.origin, Recognised(cause, loss.origin.seq, phase, _reason(row, loss, dtype)))


def _dtype(site: SiteRow) -> str:
    return next((dtype for dtype in (*site.out_dtypes, *site.in_dtypes) if dtype in HALF_DTYPES), "")


def _reason(row: IncidentRow, loss: Loss, dtype: str) -> GradientLost:
    told = details(row.evidence).get("lost")
    shares = {str(name): float(share) for name, share in told.items()} if isinstance(told, dict) else {}
    worst = max(shares, key=lambda name: shares[name], default="a parameter")
    return GradientLost(
        how=loss.how,
        dtype=dtype,
        parameter=worst,
        share=shares.get(worst, loss.share),
        others=max(0, len(shares) - 1),
    )


def information_lost(graph: StepGraph, row: IncidentRow) -> list[tuple[Origin, Recognised]]:
    """The casts of an incident that made few values of many, in order, as far as the trace has them.

    Args:
        graph: The trace of the step.
        row: The incident.
    """
    told = details(row.evidence).get("distinct")
    counts = {int(seq): count for seq, count in told.items()} if isinstance(told, dict) else {}
    found = []
    for seq, (before, after) in sorted(counts.items()):
        if seq in graph.outputs:
            site = graph.site(seq)
            reason = ValuesLost(before=before, after=after, dtype=_dtype(site), read=next(iter(site.in_dtypes), ""))
            found.append((Origin(seq, 0, (seq,), seq), Recognised(Cause.INFORMATION_LOST, seq, site.phase, reason)))
    return found
