"""Spikes are judged by the steps around them, and placed at the op in which values first rose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ampscope.analysis.arrays import FloatArray
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.causes.harmless import FarOut, Rise, Since, Spiked
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.diagnosis.around_spikes import AFTER, FAR_OUT, RECENT, LossCourse
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.results import Incident
from ampscope.analysis.step_graph import SiteTable, StepGraph
from ampscope.analysis.tables.step_history import History
from ampscope.analysis.tables.traced_steps import traced_steps
from ampscope.numerals import number
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, EventKind, Node, Phase, Source, Table, source_of
from ampscope.trace.schema.tables import details
from ampscope.trace.vocabulary import Cause, Severity

#: A value has risen if its largest magnitude is this many times that of the good step,
RISEN = 10.0
#: although those of all that it was computed from are not more than this many times theirs.
NOT_RISEN = 3.0
#: A learning rate or a loss scale has changed if it did by more than this share.
MOVED = 0.2

_Key = tuple[str, str, str, str, str, int, int, int]


class Risen(NamedTuple):
    """The first op whose result rose though its operands had not, or the input that came in larger."""

    graph: StepGraph
    seq: int
    is_input: bool
    fact: Rise

    def incident(self, reason: Spiked) -> Incident:
        """Returns the spike that is placed here."""
        site = self.graph.place(self.seq)
        op, phase = (Node.INPUT, Phase.FORWARD) if self.is_input else ("", "")
        told = Occurrence(op=op, reason=reason)
        return incident_at(Cause.SPIKE, self.graph.step, phase, told=told, graph=self.graph, seq=self.seq, site=site)


class SpikeComparison(NamedTuple):
    """A step that was run again, and a good one before it that was traced as it ran."""

    good: StepGraph
    now: StepGraph


def compared(run: Run, sites: SiteTable, step: int, optimizer: int) -> SpikeComparison | None:
    """A step and a good one; None where nothing to compare with was traced.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        step: The step.
        optimizer: The number of its optimizer.
    """
    live = source_of(Source.LIVE, optimizer)
    earlier = (one.step for one in traced_steps(run, rank=sites.rank) if one.source == live and one.step < step)
    good = next(earlier, None)
    if good is None:
        return None
    now = StepGraph(run, sites, step, source_of(Source.REPLAY, optimizer))
    return SpikeComparison(StepGraph(run, sites, good, live), now) if now.outputs else None


def since(history: History, step: int, graphs: SpikeComparison | None) -> Since:
    """Finds what is otherwise than in the step before, and than in a good step that was traced.

    Args:
        history: The steps of the optimizer.
        step: The step.
        graphs: The step and a good one.
    """
    place = int(np.searchsorted(history.step, step))
    found = Since(rate=_moved(history.lr, place), scale=_moved(history.scale, place))
    if graphs is None:
        return found
    before, now = _rows(graphs.good), _rows(graphs.now)
    found = found._replace(batch=(before, now) if before and now and before != now else None)
    were = _dtypes(graphs.good)
    for key, dtype in _dtypes(graphs.now).items():
        if were.get(key, dtype) != dtype:
            return found._replace(dtype=(were[key], dtype), op=key[0], module=key[2])
    return found


def _dtypes(graph: StepGraph) -> dict[_Key, str]:
    """The dtype of what each op gives, but for casts: how many there are depends on the dtypes themselves."""
    sites = ((key, graph.site(seq)) for key, (seq, _) in _numbered(graph))
    computed = ((key, site) for key, site in sites if site.op not in ENTRY_NODES and "_to_copy" not in site.op)
    return {key: site.out_dtypes[key[6]] for key, site in computed if key[6] < len(site.out_dtypes)}


def _moved(values: FloatArray, place: int) -> tuple[float, float] | None:
    """Returns a number's value before and now; None where it was nearly the same, or is not known."""
    before, now = (float(each) for each in values[place - 1 : place + 1]) if place > 0 else (1.0, 1.0)
    return (before, now) if abs(now - before) > MOVED * abs(before) else None


def _rows(graph: StepGraph) -> int | None:
    """The first dimension of the first input that has one."""
    inputs = (graph.site(seq) for seq in sorted(graph.outputs) if graph.site(seq).op == Node.INPUT)
    shapes = (site.out_shapes[0] for site in inputs if site.out_shapes and site.out_shapes[0])
    first = next(shapes, "").partition("x")[0]
    return int(first) if first.isdigit() else None


def risen(graphs: SpikeComparison, history: History | None) -> Risen | None:
    """Finds where the values of a step, which was run again, first rose above those of a good one.

    Args:
        graphs: Both.
        history: The steps of their optimizer.
    """
    now, good = graphs.now, graphs.good.step
    same_scale = history is not None and repr(history.scale_at(good)) == repr(history.scale_at(now.step))
    sizes = _sizes(graphs.good)
    grown: dict[int, float] = {}
    for key, (seq, size) in _numbered(now):
        before = sizes.get(key)
        comparable = same_scale or now.site(seq).phase == Phase.FORWARD
        if before is None or not before > 0 or not comparable:
            continue
        grown[seq] = max(grown.get(seq, 0.0), size / before)
        site = now.site(seq)
        operands = [grown.get(edge.from_seq) for edge in now.inputs[seq]]
        known = all(each is not None and each <= NOT_RISEN for each in operands)
        is_input = site.op == Node.INPUT
        if grown[seq] >= RISEN and (is_input or (operands and known)):
            return Risen(now, seq, is_input, Rise(site.op, site.name, site.module, size, before, good))
    return None


def _sizes(graph: StepGraph) -> dict[_Key, float]:
    return {key: size for key, (_, size) in _numbered(graph)}


def _numbered(graph: StepGraph) -> list[tuple[_Key, tuple[int, float]]]:
    """Each output in the order of execution, by its program point and how often that was reached before."""
    reached: Counter[tuple[str, str, str, str, str, int, int]] = Counter()
    found = []
    for seq in sorted(graph.outputs):
        site = graph.site(seq)
        if site.op in SINK_NODES:
            continue
        for row in graph.outputs[seq]:
            if row.min is None or row.max is None:
                continue
            point = (site.op, site.name, site.module, site.phase, site.file, site.line, row.out)
            key = (*point, reached[point])
            reached[point] += 1
            found.append((key, (seq, max(abs(row.min), abs(row.max)))))
    return found


#: A gradient norm this many times the largest before is told though a run has ended too soon to show what came of it.
ENORMOUS = 100.0


def spikes(run: Run, sites: SiteTable, history: Mapping[int, History], failures: Sequence[Incident]) -> list[Incident]:
    """Each spike that the training did not get over, as a warning; those that it did together as one note.

    A gradient norm that has not come back is a warning, or a note where something accounts for it. Where nothing is
    known, as where all batches are otherwise from then on, nothing is said.

    Args:
        run: The run.
        sites: The sites of one of its ranks.
        history: The steps of that rank, by optimizer.
        failures: The incidents of steps that were not finite.
    """
    judge = _Judge(run, sites, history, sorted(each.step for each in failures if each.severity is Severity.ERROR))
    told: list[Incident] = []
    passing: list[Incident] = []
    for row in run.rows(Table.EVENTS, rank=sites.rank, kind=EventKind.SPIKE):
        said = details(row.text)
        seen, optimizer = _seen(row.step, said), said.get("optimizer")
        if seen is None or not isinstance(optimizer, int) or (told and row.step <= told[-1].step + AFTER):
            continue  # what follows one that the training did not get over is its work
        judged = judge.judged(seen, optimizer)
        if judged is not None:
            replay, reason = str(said.get("replay", "")), str(said.get("replay_reason", ""))
            kind = told if judged.severity is Severity.WARNING or judged.lasting else passing
            kind.append(replace(judged, replay=replay, replay_reason=reason))
    if passing:
        told.append(replace(passing[0], last_step=passing[-1].step, count=len(passing)))
    return told


def led_there(incidents: Iterable[Incident], spikes: Iterable[Incident]) -> list[Incident]:
    """The incidents, a run that blew up with the spike that threw it off."""
    marked = [each for each in spikes if each.severity is Severity.WARNING]
    return [_after(each, marked) if each.cause is Cause.DIVERGENCE else each for each in incidents]


def _after(incident: Incident, marked: Sequence[Incident]) -> Incident:
    first = next((each for each in marked if each.step < incident.step <= each.step + AFTER), None)
    if first is None:
        return incident
    why = f"{incident.explanation} It began at step {first.step:,}. {first.explanation}"
    return replace(incident, explanation=why, remedies=(*first.remedies, *incident.remedies))


def _seen(step: int, said: dict[str, Any]) -> Spiked | None:
    """Reads what was recorded of a spike; None where a damaged trace holds something else."""
    try:
        rows = said.get("rows") or {}
        return Spiked(
            step=step,
            far_out=tuple(FarOut(str(name), **each) for name, each in said["out"].items()),
            parameters=tuple((str(name), float(share)) for name, share in said["parameters"]),
            rows=tuple(map(int, rows.get("rows", ()))),
            batch=int(rows.get("of", 0)),
            share=float(rows.get("share", 0.0)),
            inputs=tuple((str(name), tuple(map(int, each))) for name, each in said["inputs"].items()),
            stepped=None if said.get("stepped") is None else float(said["stepped"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
class _Judge:
    """Judges a spike by the rest of its run."""

    run: Run
    sites: SiteTable
    history: Mapping[int, History]
    bad_steps: Sequence[int]  #: that were not finite, in order

    def judged(self, seen: Spiked, optimizer: int) -> Incident | None:
        """The incident that a spike is; None where it is not known what became of the training."""
        history = self.history.get(optimizer)
        course = LossCourse.of(history, seen.step) if history is not None else None
        if history is None or course is None:
            return None
        # The losses of several optimizers move against each other: what is usual there, nobody knows.
        only_one = len(self.history) == 1
        graphs = compared(self.run, self.sites, seen.step, optimizer)
        found = risen(graphs, history) if graphs is not None else None
        came_in_larger = found is not None and found.is_input
        marked = only_one and left_a_mark(seen, course, self.bad_steps, came_in_larger=came_in_larger)
        of_batch = marked and (bool(seen.rows) or came_in_larger)  # then that is the story, and the norm a part of it
        out = course.norms_out[: 0 if of_batch or not seen.by_gradients else None]
        if not (marked or out.size) and (not only_one or course.loss_back is None):
            return None
        changed = since(history, seen.step, graphs)
        batch = max(changed.batch) / min(changed.batch) if changed.batch is not None else 1.0
        warned = marked or (only_one and bool(out.size) and not course.accounts_for(float(np.median(out)), batch))
        outcome = _lasting(course, out) if out.size else _outcome(course, self.bad_steps) if marked else _back(course)
        rise = found.fact if found is not None else None
        lasts = bool(out.size) and not marked
        reason = replace(seen, outcome=outcome, rise=rise, since=changed, lasting=lasts)
        if found is None:
            phase = Phase.BACKWARD if seen.by_gradients else Phase.FORWARD
            told = Occurrence(module=seen.main_parameter.rpartition(".")[0], reason=reason)
            incident = incident_at(Cause.SPIKE, seen.step, phase, told=told, rank=self.sites.rank)
        else:
            incident = found.incident(reason)
        return replace(
            incident,
            last_step=int(history.step[-1]) if out.size else seen.step,
            count=out.size + 1,
            severity=Severity.WARNING if warned else Severity.INFO,
            remedies=remedies(Cause.SPIKE, reason=reason) if warned else (),
            lasting=bool(out.size),
        )


def left_a_mark(seen: Spiked, course: LossCourse, bad_steps: Sequence[int], *, came_in_larger: bool) -> bool:
    """Whether a spike, and nothing else that is known, put the training back.

    What all batches are like from then on (a curriculum, another task) raises the loss of the step itself as it raises
    those after it, and so does a learning rate that was raised: neither is the spike's doing. So the step has to have
    been alone in something: its loss was usual, and only its gradients were not; or few rows of its batch made them,
    or it was given what is out of all proportion, and its loss was far from those that follow. Of a run that has ended
    soon after, only gradients of such a step that are enormous are told.

    Args:
        seen: The spike.
        course: The losses around it.
        bad_steps: The steps that were not finite.
        came_in_larger: The step was given larger values than a good one before.
    """
    if course.rate_rose:
        return False
    alone = bool(seen.rows) or came_in_larger
    if course.ended_at(bad_steps) is not None:
        return alone
    if course.is_cut_short:
        return alone and _was_enormous(seen)
    return course.stayed_up and ((seen.by_gradients and course.was_usual) or (alone and course.was_apart))


def _was_enormous(seen: Spiked) -> bool:
    """Whether the optimizer was given gradients that nobody expects to see again: the loop had not clipped them."""
    norm = next((each for each in seen.far_out if each.quantity == "grad_norm"), None)
    return norm is not None and seen.stepped is not None and seen.stepped >= ENORMOUS * norm.highest


def _outcome(course: LossCourse, bad_steps: Sequence[int]) -> str:
    end = course.ended_at(bad_steps)
    if end is not None:
        return f"The training did not get over it: step {end:,} was not finite any more."
    if course.is_cut_short:
        many = f"{course.after.size:,} steps follow" if course.after.size != 1 else "One step follows"
        return f"{many}, too few to tell whether the training gets over it."
    after, before = (float(np.median(each)) for each in (course.settled, course.recent))
    return f"The loss stayed up: {number(after)} in the steps after it, {number(before)} in those before."


def _lasting(course: LossCourse, out: FloatArray) -> str:
    """Says that a gradient norm did not come back, and what the loss did."""
    middle, steps = float(np.median(out)), course.norms_after.size
    many = f"all {steps:,}" if out.size == steps else f"{out.size:,} of the {steps:,}"
    told = (
        f"It has not come back: in {many} steps since, the norm is more than {FAR_OUT:g} times the largest before, and "
        f"in the middle of them {middle / course.norms.max():,.0f} times, {number(middle)}."
    )
    latest, recent = (float(np.median(each)) for each in (course.settled[-RECENT:], course.recent))
    now = f" The loss is {number(latest)} in the latest steps; before the jump it was {number(recent)}."
    return told + (now if np.isfinite([latest, recent]).all() else "")


def _back(course: LossCourse) -> str:
    """Names what has come back to what it had been: the loss at least, or nothing is said."""
    norm, told = course.norm_back, f"The loss came back to {number(course.loss_back or 0.0)}"
    if norm is None and course.norms.size and course.norms_after.size:
        highest, latest = number(course.norms.max()), number(float(np.median(course.norms_after[-RECENT:])))
        return f"{told}; the gradient norm, at most {highest} before, is {latest} in the latest steps."
    return f"{told}{f' and the gradient norm to {number(norm)}' if norm is not None else ''}. The training got over it."
