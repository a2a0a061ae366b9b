"""Tells of writes between two steps that left something inf or NaN: the op, its line and the step it counts for."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ampscope import provenance
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.replay.results import ReplayResult
from ampscope.capture.replay.tape.entry import EarlierResult
from ampscope.capture.step.carried.closeup import Closeups, Traced, is_given
from ampscope.capture.step.carried.condition import Condition
from ampscope.capture.step.carried.listening.gap import Gap
from ampscope.capture.step.carried.listening.loop_position import Position, is_above
from ampscope.capture.step.carried.still_carried import StillCarried
from ampscope.capture.step.measures.state.held import largest_within
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.user_line import program_line
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import ReplayStatus, Trigger

#: Writes that are run again in one run: a tensor that goes bad again and again has been explained by then.
MOST_CLOSEUPS = 24
#: Looks on the way from the device; a host that runs further ahead loses the oldest.
MOST_LOOKS = 4


class Result(NamedTuple):
    """A tensor that a call between two steps has made or written, and that is alive."""

    name: str  #: of what makes it, or of the memory that it lies in
    tensor: weakref.ref[Tensor]
    source: EarlierResult


@dataclass(slots=True)
class _Look:
    """Results of the calls between two steps, on the way to be known as finite or not."""

    parcel: Parcel
    results: list[Result]
    gap: Gap
    before: tuple[int, int]  #: step and optimizer of the attempt before
    forward: Position | None  #: where the first forward after it stands; None where none came


@dataclass(slots=True)
class _Write:
    """A write that left something not finite, until it is known whether a step reads what comes of it."""

    after: tuple[int, int]  #: step and optimizer that it counts for
    label: str
    outcome: ReplayResult
    rows: TracedRows | None
    evidence: Evidence
    is_absorbed: bool = False  #: the calls between the steps made numbers of an infinity: something over it is zero


class WrittenBetween:
    """Looks at what was written between steps, and runs the calls again that left something not finite.

    Args:
        models: The watched models.
        condition: Learns what was found.
        recorder: Where rows go.
        guard: Catches faults in it.
    """

    def __init__(self, models: Models, condition: Condition, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._condition = condition
        self._closeups = Closeups(models, recorder, guard)
        self._still = StillCarried(self._closeups)
        self._before = (-1, 0)
        self._looks: deque[_Look] = deque(maxlen=MOST_LOOKS)
        self._untold: list[_Write] = []
        self._examined = 0
        self._written = 0

    def after(self, attempt: StepAttempt) -> None:
        """An attempt is over."""
        self._before = attempt.step, attempt.index

    def look(self, gap: Gap, found: list[tuple[str, Tensor, EarlierResult]], forward: Position | None) -> None:
        """Sends for what results hold.

        Args:
            gap: The calls that made or wrote them.
            found: The results with what they are called.
            forward: Where the loop's next forward stands; None where none comes.
        """
        largest = largest_within([tensor for _, tensor, _ in found])
        parcel = Parcel(dict(zip(map(str, range(len(found))), largest, strict=True)))
        results = [Result(name, weakref.ref(tensor), source) for name, tensor, source in found]
        self._looks.append(_Look(parcel, results, gap, self._before, forward))

    def look_for_stillness(self, gap: Gap) -> None:
        """Looks for averages that stand still, if the turn has come."""
        self._still.look(gap, self._closeups.names(gap), self._before)

    def arrived(self, *, wait: bool = False) -> None:
        """Learns what results were not finite, once the host knows; runs the calls again that left them so."""
        while self._looks and (wait or self._looks[0].parcel.arrived):
            look = self._looks.popleft()
            known = [value is None or math.isfinite(value) for value in look.parcel.values().values()]
            by_name: dict[str, list[int]] = {}
            for place, result in enumerate(look.results):
                by_name.setdefault(result.name, []).append(place)
            bad: list[Result] = []
            for name, places in by_name.items():
                seen = [(look.results[place].tensor(), known[place]) for place in places]
                bad += [look.results[places[each]] for each in self._condition.seen(name, seen)]
            if bad:
                self._examine(look, bad)

    def _examine(self, look: _Look, bad: list[Result]) -> None:
        """Finds the op that left results not finite, and follows what comes of them."""
        self._examined += 1
        outcome, started = ReplayResult(ReplayStatus.EXACT), time.perf_counter()
        traced, names = None, self._closeups.names(look.gap)
        if self._examined > MOST_CLOSEUPS:
            outcome = ReplayResult(ReplayStatus.UNAVAILABLE, "many writes of the run had been looked into before")
        else:
            with Suppressed() as suppressed:
                traced = self._closeups.traced(look.gap, names, [(each.name, each.source) for each in bad])
            if suppressed.error is not None:
                outcome = ReplayResult(ReplayStatus.UNAVAILABLE, str(suppressed.error)[:200])
        entry, is_absorbed = bad[0].source.entry, False
        if traced is not None:
            graph = provenance.Graph(traced.rows.ops, traced.rows.edges, self._recorder.sites.row)
            born = _born(graph)
            if born is None:
                self._condition.given(each.name for each in bad)
                return
            entry, is_absorbed = traced.call_of(born), bool(provenance.absorbed(graph))
        elif not any(self._condition.was_finite(each.name) for each in bad):
            return
        outcome.seconds = time.perf_counter() - started
        self._note(look, bad, _Born(entry, traced, outcome, is_absorbed))

    def _note(self, look: _Look, bad: list[Result], born: _Born) -> None:
        above = look.forward is not None and is_above(look.gap.positions[born.entry], look.forward)
        after = look.before[0] + above, look.before[1]
        label = self.label(bad[0].name, after[0])
        rows = born.traced.counted_for(after) if born.traced is not None else None
        evidence = Evidence(carried=(label,), source=program_line(look.gap.tape[born.entry].place))
        if born.traced is not None:
            wide = self._closeups.in_float32(look.gap, [each.source for each in bad])
            evidence = replace(evidence, in_float32=wide)
        self._untold.append(_Write(after, label, born.outcome, rows, evidence, born.is_absorbed))
        for result in bad:
            if (tensor := result.tensor()) is not None:
                self._condition.descent.add(tensor, label)
        self._condition.descent.follow(look.gap.tape, {result.source.entry for result in bad}, label)

    def label(self, name: str, step: int) -> str:
        """Makes the label by which a write that left something bad, and what comes of it, are known.

        Args:
            name: The name of the tensor that it left bad.
            step: The step that it counts for.
        """
        self._written += 1
        label = f"{name}, written at step {step}" + (f" ({self._written})" if self._written > 1 else "")
        self._condition.left(label)
        return label

    def hold(self, attempt: StepAttempt, labels: Iterable[str], outcome: ReplayResult) -> None:
        """A step has left these not finite, and nothing of it has suffered yet.

        Args:
            attempt: Its attempt.
            labels: Of what it left.
            outcome: Whether a replay of it is traced.
        """
        for label in labels:
            after = attempt.step, attempt.index
            self._untold.append(_Write(after, label, outcome, None, Evidence(carried=(label,))))

    def read(self, labels: set[str]) -> None:
        """The step in progress reads what comes of these writes: what was made of an infinity matters now."""
        for write in [each for each in self._untold if each.is_absorbed and each.label in labels]:
            write.evidence = replace(write.evidence, read=True)
            self._tell(write)

    def failed(self, labels: set[str]) -> None:
        """A step that reads what comes of these writes has gone wrong."""
        for write in [each for each in self._untold if each.label in labels]:
            self._tell(write)

    def remained(self, labels: set[str]) -> None:
        """The run has ended, and what these writes left in averages of the model is not finite still."""
        for write in [each for each in self._untold if each.label in labels]:
            write.evidence = replace(write.evidence, remains=True)
            self._tell(write)

    def _tell(self, write: _Write) -> None:
        self._untold.remove(write)
        self._closeups.record(Trigger.NONFINITE_CARRIED, write.after, write.rows, write.outcome, write.evidence)


class _Born(NamedTuple):
    """Holds what is known of how results of calls between steps came to be not finite."""

    entry: int  #: the call that made the first of them so
    traced: Traced | None
    outcome: ReplayResult
    is_absorbed: bool


def _born(graph: provenance.Graph) -> int | None:
    """The first op that made something not finite by itself, and did not only hand on what it was given."""
    return next((origin.seq for origin in provenance.origins(graph) if not is_given(graph, origin.seq)), None)
