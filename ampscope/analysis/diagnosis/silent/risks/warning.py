"""A warning as an incident: at the op in which it was measured, in the step that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes.catalogue import CATALOGUE, explanation
from ampscope.analysis.causes.cause_entry import Occurrence, Reason
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.origin.step_graph import Sites, StepGraph, public_phase, source_line
from ampscope.analysis.precision.ranges.measured import MeasuredPlace, MeasuredRun
from ampscope.analysis.precision.ranges.places import place_of
from ampscope.analysis.results import Incident
from ampscope.provenance.meant import magnitude
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Source, source_of
from ampscope.trace.vocabulary import Cause


@dataclass(frozen=True, slots=True)
class Warnings:
    """Makes warnings of what was measured on one rank."""

    run: Run
    sites: Sites
    measured: MeasuredRun

    def graph(self, seen: MeasuredPlace, step: int | None = None) -> StepGraph:
        """A step in which a place was measured, by default the newest."""
        step = seen.course[-1][0] if step is None else step
        execution = Source.LIVE if step in self.measured.live else Source.REPLAY
        return StepGraph(self.run, self.sites, step, source_of(execution, seen.place.optimizer))

    def warning(
        self,
        cause: Cause,
        reason: Reason,
        seen: MeasuredPlace,
        graph: StepGraph,
        seq: int | None,
        *,
        headroom: float | None = None,
    ) -> Incident:
        """The warning that a place is.

        Args:
            cause: What it warns of.
            reason: What was seen.
            seen: The place.
            graph: The step that shows it.
            seq: Its op there, if the step has it.
            headroom: Doublings left to overflow, where that is what it warns of.
        """
        site = graph.place(seq) if seq is not None else None
        place, ahead = seen.place, seen.forecast
        told = Occurrence(op=place.op, name=place.name, module=place.module, reason=reason)
        return Incident(
            step=graph.step,
            last_step=graph.step,
            severity=CATALOGUE[cause].severity,
            cause=cause,
            phase=public_phase(place.phase),
            op=place.op,
            module=place.module,
            module_type=graph.module_type(site) if site is not None else "",
            source=source_line(site) if site is not None else place.source,
            inputs=graph.operands(seq) if seq is not None else (),
            outputs=graph.results(seq) if seq is not None else (),
            path=graph.path((seq,)) if seq is not None else (),
            traced=graph.source,
            explanation=explanation(cause, told),
            remedies=remedies(cause, op=place.op, module=place.module, reason=reason),
            rank=self.sites.rank,
            headroom_bits=headroom,
            forecast_step=ahead.step if ahead is not None else None,
            forecast_low=ahead.low if ahead is not None else None,
            forecast_high=ahead.high if ahead is not None else None,
        )


def largest_at(graph: StepGraph, seen: MeasuredPlace) -> int | None:
    """The op that gave the largest value at a place in a step; None where the step has none of it."""
    found: list[tuple[float, int]] = []
    for seq, rows in graph.outputs.items():
        for row in rows:
            place = place_of(graph.site(seq), row.out, seen.place.optimizer)
            if place == seen.place:
                found.append((magnitude(row), -seq))
    return -max(found)[1] if found else None
