"""A loop's write between two steps left a weight or a tensor of its own inf or NaN: its op, line and step."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ampscope import provenance
from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.events import StepAttempt
from ampscope.capture.loop_state.gap_replay import Closeups, Names, Traced, is_given
from ampscope.capture.loop_state.held_state import largest, largest_within
from ampscope.capture.loop_state.loop_calls import Gap, Latest, Position, TakenOver, is_above
from ampscope.capture.loop_state.loop_tensors import Condition
from ampscope.capture.loop_state.still_averages import StillCarried
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.tape_entry import EarlierResult
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import program_line
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Node, ReplayStatus, Source, Trigger, source_of

#: Elements of all weights up to which they are copied before a loop moves them, and its calls kept.
MOST_ELEMENTS = 1 << 18


class IncidentReport(Protocol):
    """Is told of incidents."""

    def report(self, attempt: StepAttempt, trigger: Trigger, outcome: ReplayResult, evidence: Evidence) -> None:
        """An attempt was one."""


class _Move(NamedTuple):
    """The loop moves weights, and nothing has looked yet at what they become."""

    attempt: StepAttempt
    weights: list[tuple[str, Tensor]]
    slopes: dict[int, tuple[str, Tensor, int]]  #: gradients by ``id`` of the weight: whose, themselves, their version
    before: dict[int, Tensor]  #: weights, and gradients that the loop zeroes in place, by ``id``

    def names(self) -> Names:
        """Returns what the weights and gradients that the calls read are, and are called, by ``id``."""
        names: Names = {id(weight): (Node.PARAMETER, name) for name, weight in self.weights}
        return names | {id(slope): (Node.INPUT, f"the gradient of {name}") for name, slope, _ in self.slopes.values()}


class _MoveLook(NamedTuple):
    """The weights that a move has left, on the way to be known as finite or not."""

    move: _Move
    gap: Gap
    parcel: Parcel


class MovedWeights:
    """Looks at weights that the loop has moved by itself, and runs its calls again where they have left one bad.

    A loop moves one weight after the other, and the step is judged before it writes the first. What the others become
    is seen when it goes on to the next step; its calls are kept until then, if the models are small.

    Args:
        engine: Makes what observes its calls.
        tape: The tape of the step in progress.
        recorder: Where rows go.
        report: Is told of weights that were left bad.
    """

    def __init__(self, engine: RerunEngine, tape: StepTape, recorder: Recorder, report: IncidentReport) -> None:
        self._models = engine.models
        self._tape = tape
        self._recorder = recorder
        self._report = report
        self._closeups = Closeups(engine, recorder)
        self._move: _Move | None = None
        self._look: _MoveLook | None = None
        self._copies: dict[int, Tensor] = {}  # of weights and gradients, by ``id``
        self._seen: list[int] = []  # the weights at the last look, by ``id``
        self._small: list[tuple[str, Tensor]] = []  # those that are followed
        self._zeroes = False  # the loop overwrites its gradients before it goes on
        self._is_over = False  # weights are known to be bad, and so is what comes of them

    def begin(self, attempt: StepAttempt) -> bool:
        """The loop may be about to write the first weight by itself; returns whether its calls are to be kept."""
        self._move = None
        if not attempt.by_hand or attempt.bad or self._is_over:
            return False
        self.arrived(wait=True)  # the gradients of this step are known, and so is what the move before has left
        weights = self._weights()
        if not weights:
            return False
        grads = [(name, weight, weight.grad) for name, weight in weights if weight.grad is not None]
        slopes = {id(weight): (name, slope, version_counter(slope)) for name, weight, slope in grads}
        kept = [slope for _, _, slope in grads if self._zeroes and _is_plain(slope)]
        before = self._copied([*(weight for _, weight in weights), *kept])
        self._move = _Move(attempt, weights, slopes, before)
        return True

    def _weights(self) -> list[tuple[str, Tensor]]:
        """Returns the weights that the loop may move, if they are small enough to be copied; else none."""
        known = list(self._models.parameters.values())
        if [*map(id, (weight for _, weight in known))] != self._seen:
            self._seen = [*map(id, (weight for _, weight in known))]
            trained = [each for each in known if each[1].requires_grad and light_statistics.may_turn_bad(each[1])]
            fit = sum(each.numel() for _, each in trained) <= MOST_ELEMENTS
            self._small = trained if fit and all(_is_plain(each) for _, each in trained) else []
        return self._small

    @property
    def before(self) -> dict[int, Tensor]:
        """The weights as they were before the move, by ``id``."""
        return self._copies

    def taken_over(self) -> TakenOver:
        """Returns what the step has computed of its gradients before the loop writes the first weight."""
        slopes = self._move.slopes if self._move is not None else {}
        return Latest.of(self._tape.calls).renumbered({key: slope for key, (_, slope, _) in slopes.items()})

    def _copied(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Copies, in the memory of those before where they fit."""
        with torch.no_grad():
            live = [each.detach() for each in tensors]
            kept = zip(live, self._copies.values(), strict=False)
            same = [*self._copies] == [*map(id, tensors)]
            if same and live and all(a.shape == b.shape and a.dtype == b.dtype for a, b in kept):
                torch._foreach_copy_([*self._copies.values()], live)
            else:
                self._copies = {id(each): copied.clone() for each, copied in zip(tensors, live, strict=True)}
        return self._copies

    def look(self, gap: Gap | None, *, wait: bool) -> None:
        """The loop goes on to the next step: what it has left is looked at, as soon as that is known.

        Args:
            gap: What it has called since `begin`.
            wait: None will come.
        """
        move, self._move = self._move, None
        if move is not None and gap is not None:
            self._zeroes |= any(version_counter(slope) != version for _, slope, version in move.slopes.values())
            sizes = largest([weight.detach() for _, weight in move.weights])
            self._look = _MoveLook(move, gap, Parcel(dict(zip(map(str, range(len(sizes))), sizes, strict=True))))
        self.arrived(wait=wait)

    def arrived(self, *, wait: bool = False) -> None:
        """Learns what weights the latest move has left not finite, once the host knows."""
        look = self._look
        if look is None or not (wait or look.parcel.arrived):
            return
        self._look = None
        known = zip(look.move.weights, look.parcel.values().values(), strict=True)
        bad = [each for each, size in known if not math.isfinite(size or 0.0)]
        if bad:
            self._is_over = True
            self._examine(look, bad)

    def _examine(self, look: _MoveLook, bad: list[tuple[str, Tensor]]) -> None:
        """Runs the calls again, on copies, and tells of the op that they made a weight bad with."""
        attempt, source = look.move.attempt, source_of(Source.REPLAY, look.move.attempt.index)
        if attempt.bad or attempt.traced == source:
            return
        traced = None
        with Suppressed():
            written = {id(tensor): at for tensor, at in look.gap.results()}
            sinks = [(name, written[id(weight)]) for name, weight in bad if id(weight) in written]
            traced = self._closeups.traced(look.gap, look.move.names(), sinks, look.move.before)
        if traced is None:
            return
        graph = provenance.Graph(traced.rows.ops, traced.rows.edges, self._recorder.sites.row)
        if all(is_given(graph, origin.seq) for origin in provenance.origins(graph)):
            return  # what it was computed from was bad before
        attempt.traced = source
        self._recorder.trace(*traced.rows.labelled(attempt.step, source), attempt.step, source)
        names = tuple(name for name, _ in bad)
        self._report.report(
            attempt, Trigger.NONFINITE_WEIGHT, ReplayResult(ReplayStatus.EXACT), Evidence(bad_params=names)
        )

    def forget(self) -> None:
        """Forgets the move in progress: its weights are not to be looked at."""
        self._move = None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor lies here and in memory of its own kind."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


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
        engine: Makes what observes the calls.
        condition: Learns what was found.
        recorder: Where rows go.
        carried_name: The name of a tensor that the loop is known to carry; empty for any other.
    """

    def __init__(
        self, engine: RerunEngine, condition: Condition, recorder: Recorder, carried_name: Callable[[Tensor], str]
    ) -> None:
        self._recorder = recorder
        self._carried_name = carried_name
        self._condition = condition
        self._closeups = Closeups(engine, recorder)
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
        elif not any(self._has_turned(each) for each in bad):
            return
        outcome.seconds = time.perf_counter() - started
        self._note(look, bad, _Born(entry, traced, outcome, is_absorbed))

    def _has_turned(self, result: Result) -> bool:
        """Whether what is not finite is a carried tensor that was: of a fresh batch, others before it say nothing."""
        tensor = result.tensor()
        is_carried = tensor is not None and self._carried_name(tensor) != ""
        return is_carried and self._condition.was_finite(result.name)

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
