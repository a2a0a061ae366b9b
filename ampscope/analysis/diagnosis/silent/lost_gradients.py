"""A step that lost something to half precision, gradients or the difference of values: the op, and the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ampscope.analysis.causes.catalogue import explanation
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.causes.recognition import Recognised
from ampscope.analysis.causes.underflow import GradientLost, ValuesLost
from ampscope.analysis.cures.explicit_half import ExplicitHalf
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.analysis.results import SourceLine
from ampscope.provenance import HowLost, Loss, Origin, lost_mass
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run
from ampscope.trace.schema import IncidentRow, Phase, SiteRow, Source, said, source_of
from ampscope.trace.vocabulary import Cause

_CAST, _GRID = "aten._to_copy.default", "aten.arange.start_step"


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
    phase = Phase.FORWARD if site.phase in (Phase.LOSS, Phase.RECOMPUTE) else said(Phase, site.phase, Phase.FORWARD)
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
    counts, before_step = _by_number(row, "distinct"), _by_number(row, "cast_before")
    found = []
    for seq, (before, after) in sorted(counts.items()):
        if seq in graph.outputs:
            site, cast = graph.site(seq), before_step.get(seq)
            dtypes = {"dtype": _dtype(site), "read": next(iter(site.in_dtypes), "")}
            if cast is not None:
                dtypes = {"dtype": cast["dtype"], "read": cast["read"]}
            reason = ValuesLost(before=before, after=after, **dtypes)
            phase = site.phase if cast is None else Phase.FORWARD
            found.append((Origin(seq, 0, (seq,), seq), Recognised(Cause.INFORMATION_LOST, seq, phase, reason)))
    return found


def as_cast_before(row: IncidentRow, seq: int, examined: Examined) -> Examined:
    """What is known of a cast that the loop made before its step, in the place of what came in."""
    cast = _by_number(row, "cast_before").get(seq)
    if cast is None:
        return examined
    incident, op, since = examined.incident, _CAST if cast["read"] else _GRID, cast["since"]
    name = incident.path[0].name if incident.path else ""
    text = explanation(incident.cause, Occurrence(op=op, reason=examined.reason))
    text += f" The loop did so before the step, which read it{f' as {name}' if name else ''}."
    if since < row.step:
        text += f" It was first seen before step {row.step:,}; step {since:,} had read such values, too."
    source = SourceLine(**cast["source"]) if cast["source"]["file"] else None
    located = replace(incident, step=since, op=op, module="", module_type="", source=source, explanation=text)
    return examined._replace(incident=located, explicit=ExplicitHalf())


def _by_number(row: IncidentRow, key: str) -> dict[int, Any]:
    told = details(row.evidence).get(key)
    return {int(seq): each for seq, each in told.items()} if isinstance(told, dict) else {}
