"""Finds the op by which a loop that moves weights with its own hands makes one of them inf or NaN."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ampscope import provenance
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.replay.results import ReplayResult
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.step.carried.closeup import Closeups, Names, is_given
from ampscope.capture.step.carried.listening.gap import Gap
from ampscope.capture.step.carried.listening.taken_over import Latest, TakenOver
from ampscope.capture.step.measures.state.held import largest
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.tracing.statistics import stats
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


class _Look(NamedTuple):
    """The weights that a move has left, on the way to be known as finite or not."""

    move: _Move
    gap: Gap
    parcel: Parcel


class MovedWeights:
    """Looks at weights that the loop has moved by itself, and runs its calls again where they have left one bad.

    A loop moves one weight after the other, and the step is judged before it writes the first. What the others become
    is seen when it goes on to the next step; its calls are kept until then, if the models are small.

    Args:
        models: The watched models.
        tape: The tape of the step in progress.
        recorder: Where rows go.
        report: Is told of weights that were left bad.
        guard: Catches faults of the tracer.
    """

    def __init__(
        self, models: Models, tape: StepTape, recorder: Recorder, report: IncidentReport, guard: Guard
    ) -> None:
        self._models = models
        self._tape = tape
        self._recorder = recorder
        self._report = report
        self._closeups = Closeups(models, recorder, guard)
        self._move: _Move | None = None
        self._look: _Look | None = None
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
            trained = [each for each in known if each[1].requires_grad and stats.may_turn_bad(each[1])]
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
            self._look = _Look(move, gap, Parcel(dict(zip(map(str, range(len(sizes))), sizes, strict=True))))
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

    def _examine(self, look: _Look, bad: list[tuple[str, Tensor]]) -> None:
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
