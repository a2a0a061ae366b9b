"""Overflows that nothing in loss and gradients shows: divided away, or taken for numbers by the code itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampscope.analysis.origin.step_graph import StepGraph
from ampscope.analysis.results import Incident
from ampscope.analysis.words import op_in_words
from ampscope.provenance import Origin, absorbed, hidden, origins
from ampscope.trace.json_columns import details
from ampscope.trace.schema import IncidentRow, Trigger

#: Incidents in which nothing that matters is other than finite.
_ABSORBED = (Trigger.ABSORBED_OVERFLOW, Trigger.CARRIED_READ)
#: A distance from float32 that is worth a number.
_APART = 0.1
#: What is farther off than this many times is so far off that the number says no more.
_FAR_OFF = 10.0


def origins_of(row: IncidentRow, graph: StepGraph) -> list[Origin]:
    """The origins of an incident in one execution of its step, the one that matters most first."""
    if row.trigger not in _ABSORBED:
        return origins(graph)
    pairs = _hidden(row)
    return [each for each in hidden(graph) if [each.seq, each.sink] in pairs] if pairs else absorbed(graph)


def as_hidden(row: IncidentRow, graph: StepGraph, origin: Origin, incident: Incident) -> Incident:
    """An incident with what hid its overflow, and with what the same step has in float32.

    Args:
        row: The incident's row.
        graph: The execution of the step in which it was hidden.
        origin: The overflow, and the way to what hid it.
        incident: The incident.
    """
    if [origin.seq, origin.sink] not in _hidden(row):
        return incident
    site = graph.place(origin.sink)
    where = f" at {site.file.rpartition('/')[2]}:{site.line}" if site.file else ""
    text = f" {op_in_words(site.op)}{where} made finite numbers of it, so neither the loss nor a gradient shows it."
    known = details(row.evidence)
    gradients = _apart(known.get("gradients_apart"), "gradients", "their")
    loss = _apart(known.get("loss_apart"), "a loss", "its")
    told = " and ".join(filter(None, (gradients, loss))) or "other gradients for some parameters"
    return replace(incident, explanation=f"{incident.explanation}{text} The same step in float32 has {told}.")


def _apart(share: object, what: str, whose: str) -> str:
    if not isinstance(share, float) or share < _APART:
        return ""
    how_far = f"{share:.0%} of {whose} size" if share < _FAR_OFF else f"many times {whose} size"
    return f"{what} that differ{'s' if whose == 'its' else ''} by {how_far}"


def _hidden(row: IncidentRow) -> Sequence[object]:
    """Numbers of the ops that overflowed, each with that of what hid it."""
    told = details(row.evidence).get("hidden")
    return told if isinstance(told, list) else ()
