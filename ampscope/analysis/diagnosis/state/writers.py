"""Ties what a step found not finite to the step that left it so: buffers, and tensors that the loop carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampscope.analysis.causes.outside import CameIn
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.origin.step_graph import StepGraph
from ampscope.analysis.results import Incident, SourceLine, WrittenBy
from ampscope.analysis.words.wording import op_in_words
from ampscope.provenance import Origin
from ampscope.trace.json_columns import details
from ampscope.trace.schema import IncidentRow, Node, Trial, Trigger

#: Nodes that stand for what later steps find there.
_LEFT = (Node.BUFFER_AFTER, Node.CARRIED_AFTER, Node.WEIGHT_AFTER)
_NOT_UNDONE = "A skipped step does not undo what is written there."


def with_writers(found: Sequence[Examined]) -> list[Examined]:
    """The incidents with who wrote what they found, and without writes that did no step any harm.

    Args:
        found: All incidents of a run, in the order of their steps.
    """
    ordered = sorted(found, key=lambda each: each.incident.step)
    writers: dict[tuple[int, str], Examined] = {}
    readers: dict[int, Incident] = {}  # by the position of who wrote what it read: the first of them
    linked = list(found)
    for each in ordered:
        for name in each.leaves:
            writers[each.incident.rank, name] = each
    for place, each in enumerate(found):
        wrote = _writer(each, writers)
        if wrote is not None:
            linked[place] = each._replace(incident=_since(each.incident, wrote.incident))
            readers.setdefault(found.index(wrote), each.incident)
    return [
        each._replace(incident=_read_by(each, readers.get(place)))
        for place, each in enumerate(linked)
        if each.matters or (place in readers and each.incident.op)
    ]


def _writer(examined: Examined, writers: dict[tuple[int, str], Examined]) -> Examined | None:
    """Who left what a step found, of those who handed it on the first; None where it is not known, or began here."""
    incident, reason = examined.incident, examined.reason
    if incident.written_by is not None or not isinstance(reason, CameIn):
        return None
    found = writers.get((incident.rank, reason.name))
    if found is None or found is examined or found.incident.step > incident.step:
        return None
    earlier = _writer(found, writers) if found.incident.step < incident.step else None
    return earlier or found


def _since(incident: Incident, wrote: Incident) -> Incident:
    where = f" at {wrote.source.file.rpartition('/')[2]}:{wrote.source.line}" if wrote.source else ""
    by = f"{op_in_words(wrote.op)}{where}" if wrote.op else f"what the loop wrote{where}"
    text = f"{incident.explanation} It is so since step {wrote.step:,}: {by} left it. {_NOT_UNDONE}"
    by_whom = WrittenBy(step=wrote.step, op=wrote.op, module=wrote.module, source=wrote.source)
    return replace(incident, explanation=text, written_by=by_whom)


def _read_by(wrote: Examined, reader: Incident | None) -> Incident:
    incident = wrote.incident
    if incident.trigger != Trigger.NONFINITE_CARRIED:
        return incident
    what = f"step {reader.step:,} read it" if reader is not None else "the step that came next read it"
    if reader is None and wrote.remains:
        what = "it was not finite still when the run ended: it is kept of the model's own weights or buffers"
    text = f"{incident.explanation} The loop carries that from step to step, and {what}. {_NOT_UNDONE}"
    return replace(incident, explanation=text)


def as_write(row: IncidentRow, examined: Examined) -> Examined:
    """What is known of a write that left a carried tensor not finite, as far as it was not traced, too."""
    known = details(row.evidence)
    if row.trigger != Trigger.NONFINITE_CARRIED or "carried" not in known:
        return examined
    source, names = known.get("source"), known["carried"]
    if examined.incident.source is None and isinstance(source, dict) and source.get("file"):
        examined = examined._replace(incident=replace(examined.incident, source=SourceLine(**source)))
    remains = known.get("remains") is True
    leaves = examined.leaves | frozenset(names)
    tried = known.get("in_float32")
    wide = tried == Trial.FINITE if tried in (Trial.FINITE, Trial.NONFINITE) else None
    return examined._replace(leaves=leaves, remains=remains, matters=remains or known.get("read") is True, wide=wide)


def left_by(graph: StepGraph, found: Sequence[Origin]) -> frozenset[str]:
    """Names of what a step left not finite, and had not found so."""
    left = {graph.site(seq).name for seq in graph.sinks() if graph.site(seq).op in _LEFT}
    return frozenset(left - {graph.site(origin.seq).name for origin in found})
