"""Incidents of state that outlives a step and turned bad, and of who wrote the state that a step found so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from ampscope.analysis.causes.catalogue import explanation
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.causes.outside import CameIn
from ampscope.analysis.causes.recognition import Recognised, recognise
from ampscope.analysis.causes.state import AverageHeld, FollowerHeld, TurnedBad, WeightHeld
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.results import Incident, SourceLine, WrittenBy
from ampscope.analysis.step_graph import StepGraph, module_of_update
from ampscope.analysis.words import capitalized, op_in_words
from ampscope.numerals import number
from ampscope.provenance import Origin, origins
from ampscope.trace.dtypes import HALF_DTYPES
from ampscope.trace.evidence import Evidence, LostUpdates
from ampscope.trace.schema import ENTRY_NODES, IncidentRow, Node, Phase, SiteRow, StateKind, Trial, Trigger
from ampscope.trace.vocabulary import Cause, Severity

_CAUSES: dict[str, Cause] = {
    StateKind.SETTING: Cause.BAD_OPTIMIZER_STATE,
    StateKind.OPTIMIZER: Cause.BAD_OPTIMIZER_STATE,
    StateKind.WEIGHT: Cause.BAD_WEIGHT,
    StateKind.BUFFER: Cause.BAD_BUFFER,
    StateKind.CARRIED: Cause.BAD_BUFFER,
}


def state_found(row: IncidentRow) -> TurnedBad | None:
    """Returns the worst of the state tensors found bad, with a count of the others; None where there are none."""
    known = [each for each in Evidence.of(row).state if each.kind in _CAUSES]
    if not known:
        return None
    first = min(known, key=lambda each: (each.bad_at, list(_CAUSES).index(StateKind(each.kind))))
    return TurnedBad(seen=first, others=len(known) - 1)


def examined_state(row: IncidentRow, reason: TurnedBad, graph: StepGraph) -> Examined:
    """The incident of state that was found bad after a step, with the op of the optimizer where it is known."""
    cause, found = _CAUSES[reason.seen.kind], None
    wanted = {Node.STATE_AFTER: reason.key, Node.WEIGHT_AFTER: reason.seen.name}
    for origin in origins(graph):
        sink = graph.site(origin.sink)
        if wanted.get(Node(sink.op)) == sink.name and graph.site(origin.seq).op not in ENTRY_NODES:
            found = recognise(graph, origin)
            if reason.seen.kind == StateKind.WEIGHT and found.cause is not Cause.UNKNOWN:
                cause = found.cause
            return _located(_state_incident(row, reason, graph.rank, cause), reason, graph, found)
    return Examined(_state_incident(row, reason, graph.rank, cause), reason)


def _located(incident: Incident, reason: TurnedBad, graph: StepGraph, found: Recognised) -> Examined:
    site, inputs = graph.site(found.seq), graph.operands(found.seq)
    largest = max((abs(each.statistics.max) for each in inputs if each.statistics.max is not None), default=None)
    of = f", of finite operands of at most {number(largest)}" if largest is not None else ""
    told = incident.explanation
    if incident.cause is not _CAUSES[reason.seen.kind]:
        told = f"{explanation(incident.cause, Occurrence(op=site.op, reason=found.reason))} {reason.in_words}"
    located = replace(
        incident,
        op=site.op,
        module=module_of_update(graph, found.seq),
        source=SourceLine.of(site),
        inputs=inputs,
        outputs=graph.results(found.seq),
        path=graph.path((found.seq,)),
        traced=graph.source,
        explanation=f"{told} {capitalized(op_in_words(site.op))} gave it{of}, when the "
        "optimizer's step was run again on copies.",
    )
    return Examined(located, reason if incident.cause is _CAUSES[reason.seen.kind] else found.reason)


def _state_incident(row: IncidentRow, reason: TurnedBad, rank: int, cause: Cause) -> Incident:
    written_by_optimizer = reason.seen.kind in (StateKind.SETTING, StateKind.OPTIMIZER, StateKind.WEIGHT)
    phase = Phase.OPTIMIZER if written_by_optimizer else Phase.FORWARD
    told = Occurrence(module=reason.seen.module, reason=reason)
    incident = incident_at(cause, reason.seen.bad_at, phase, told=told, row=row, rank=rank)
    return replace(incident, source=SourceLine.of(reason.seen.source))


def without_consequences(examined: Iterable[Examined]) -> Iterator[Examined]:
    """All but state that an incident explains: one while it was not looked at, or the last before that look."""
    known = list(examined)
    errors = [
        (each.incident.rank, each.incident.step)
        for each in known
        if each.incident.severity is Severity.ERROR and not isinstance(each.reason, TurnedBad)
    ]
    for each in known:
        if not isinstance(each.reason, TurnedBad) or not _is_explained(each.incident.rank, each.reason, errors):
            yield each


def _is_explained(rank: int, reason: TurnedBad, errors: Iterable[tuple[int, int]]) -> bool:
    since = -1 if reason.seen.finite_at is None else reason.seen.finite_at
    return any(where == rank and since < step <= reason.seen.bad_at for where, step in errors)


# -- buffers that stand still -----------------------------------------------------------------------------------------


def still_found(row: IncidentRow) -> list[FollowerHeld]:
    """The buffers that were found to stand still; none for an incident of another kind."""
    evidence = Evidence.of(row)
    return [FollowerHeld(seen=each, is_buffer=evidence.source is None) for each in evidence.still]


def examined_still(row: IncidentRow, reason: FollowerHeld, graph: StepGraph) -> Examined:
    """The incident of a buffer that stands still, with the op that writes it."""
    between = Evidence.of(row).source is not None
    narrow = Cause.STAGNATION if between else Cause.HALF_PARAMS
    cause = Cause.BF16_PRECISION if reason.seen.dtype == "bfloat16" else narrow
    seq = _op_that_wrote(graph, reason.seen.name)
    phase = Phase.OPTIMIZER if between else Phase.FORWARD
    told = Occurrence(module=reason.seen.name.rpartition(".")[0], reason=reason)
    incident = incident_at(cause, reason.seen.since, phase, told=told, row=row, graph=graph, seq=seq)
    return Examined(replace(incident, last_step=reason.seen.last), reason)


def _op_that_wrote(graph: StepGraph, name: str) -> int | None:
    """The op that wrote a buffer last, or, where an op writes it without saying so, the first that was given it."""
    entry = next((seq for seq in sorted(graph.outputs) if _is_buffer(graph.site(seq), name)), None)
    if entry is None:
        return None
    seq = entry
    while (after := next((edge for edge in graph.readers[seq] if edge.in_place and edge.seq > seq), None)) is not None:
        seq = after.seq
    return seq if seq != entry else graph.first_reader(entry)


def _is_buffer(site: SiteRow, name: str) -> bool:
    return site.op in (Node.BUFFER, Node.CARRIED, Node.PARAMETER) and site.name == name


def examined_held(row: IncidentRow, rank: int) -> Examined:
    """Returns the incident of weights or optimizer state held in place by rounding.

    The one that lost most beside the spacing of its dtype is told.
    """
    evidence = Evidence.of(row)
    first = max(evidence.held, key=_lost, default=LostUpdates())
    held = AverageHeld if first.kind == StateKind.OPTIMIZER else WeightHeld
    reason = held(seen=first, others=(evidence.count or len(evidence.held)) - 1)
    cause = Cause.BF16_PRECISION if first.dtype == "bfloat16" else Cause.HALF_PARAMS
    told = Occurrence(module=first.owner.rpartition(".")[0], reason=reason)
    incident = incident_at(cause, first.since, Phase.OPTIMIZER, told=told, row=row, rank=rank)
    return Examined(replace(incident, last_step=first.last), reason)


def _lost(found: LostUpdates) -> float:
    """Returns how far a tensor is from where it should be, in spacings of its dtype."""
    return found.off_by / (found.spacing or 1.0)


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
    begun: dict[int, Incident] = {}  # likewise, what the same step came to that goes on with what it wrote
    prepared: set[int] = set()  # likewise, of who wrote it into the batch
    linked = list(found)
    for each in ordered:
        for name in each.leaves:
            writers[each.incident.rank, name] = each
    for place, each in enumerate(found):
        wrote = _writer(each, writers)
        if wrote is None:
            continue
        if _is_of_the_step(each.incident, wrote.incident):
            if _is_of_the_batch(each.incident, wrote.incident):
                linked[place] = _prepared(each, wrote.incident)
                prepared.add(found.index(wrote))
            else:
                begun.setdefault(found.index(wrote), each.incident)
        else:
            linked[place] = each._replace(incident=_since(each.incident, wrote.incident))
            readers.setdefault(found.index(wrote), each.incident)
    for place, came_to in begun.items():
        linked[place] = _with_what_came_of_it(found[place], came_to)
        for first, each in enumerate(found):
            if linked[first] is each and _is_unheard(each, came_to) and _writer(each, writers) is None:
                linked[first] = _as_first_step(found[place], each.incident)
    steps = {(found[place].incident.rank, found[place].incident.step) for place in begun}
    return [
        each if place in begun else each._replace(incident=_read_by(each, readers.get(place)))
        for place, each in enumerate(linked)
        if place not in prepared
        and not _is_read_in(steps, each)
        and (each.matters or (place in readers and each.incident.op))
    ]


def _is_read_in(steps: Collection[tuple[int, int]], read: Examined) -> bool:
    """Whether one of some steps, by rank and number, read what it had computed, as far as any writer is known."""
    came_in = isinstance(read.reason, CameIn) and read.reason.carried and read.incident.written_by is None
    return came_in and (read.incident.rank, read.incident.step) in steps


def _is_unheard(first: Examined, later: Incident) -> bool:
    """Whether a run's first step was given, at one line, what a later one had computed: before it, nobody listens."""
    incident, reason = first.incident, first.reason
    same = (incident.rank, incident.module, incident.source) == (later.rank, later.module, later.source)
    at_start = isinstance(reason, CameIn) and reason.at_start
    return at_start and same and incident.source is not None and incident.step < later.step


def _as_first_step(wrote: Examined, first: Incident) -> Examined:
    at = replace(wrote.incident, step=first.step, last_step=first.step)
    return _with_what_came_of_it(wrote._replace(incident=at, leaves=frozenset()), first)


def _is_of_the_step(read: Incident, wrote: Incident) -> bool:
    """Whether a step itself computed what it read, before it called the model: no step before it has to do with it."""
    between = wrote.trigger == Trigger.NONFINITE_CARRIED and read.trigger != Trigger.NONFINITE_CARRIED
    return between and wrote.op != "" and wrote.step == read.step


def _is_of_the_batch(read: Incident, wrote: Incident) -> bool:
    """Whether it is what the model is called with, and no dtype is to blame for it: float32 has it in the data, too."""
    first = read.path[0] if read.path else None
    called_with = first is not None and first.op == Node.CARRIED and first.phase == Phase.FORWARD
    return called_with and not any(each.dtype in HALF_DTYPES for each in wrote.outputs)


def _prepared(read: Examined, wrote: Incident) -> Examined:
    """Tells of what the model was called with as the batch that it is, with the line that prepared it so."""
    where = f" at {wrote.source.file.rpartition('/')[2]}:{wrote.source.line}" if wrote.source else ""
    text = (
        f"What the model was called with held non-finite values: {op_in_words(wrote.op)}{where} made them of the "
        f"numbers of this step. {wrote.explanation}"
    )
    by_whom = WrittenBy(step=wrote.step, op=wrote.op, module=wrote.module, source=wrote.source)
    reason = replace(read.reason, carried=False) if isinstance(read.reason, CameIn) else read.reason
    return read._replace(incident=replace(read.incident, explanation=text, written_by=by_whom), reason=reason)


def _with_what_came_of_it(wrote: Examined, read: Incident) -> Examined:
    incident = replace(
        wrote.incident,
        trigger=read.trigger,
        tripped=read.tripped,
        replay=read.replay,
        replay_reason=read.replay_reason,
        explanation=f"{wrote.incident.explanation} The loop computes that before it calls the model, in the same step.",
        fp32_ok=wrote.wide,
        tried=(),  # that were replays of the model's call, which was given it
    )
    return wrote._replace(incident=incident, matters=True)


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
    """Adds to an incident what is known of a write that left a carried tensor not finite, traced or not."""
    known = Evidence.of(row)
    if row.trigger != Trigger.NONFINITE_CARRIED or not known.carried:
        return examined
    if examined.incident.source is None:
        examined = examined._replace(incident=replace(examined.incident, source=SourceLine.of(known.source)))
    wide = known.in_float32 == Trial.FINITE if known.in_float32 in (Trial.FINITE, Trial.NONFINITE) else None
    leaves, matters = examined.leaves | frozenset(known.carried), known.remains or known.read
    return examined._replace(leaves=leaves, remains=known.remains, matters=matters, wide=wide)


def left_by(graph: StepGraph, found: Sequence[Origin]) -> frozenset[str]:
    """Names of what a step left not finite, and had not found so."""
    left = {graph.site(seq).name for seq in graph.sinks() if graph.site(seq).op in _LEFT}
    return frozenset(left - {graph.site(origin.seq).name for origin in found})
