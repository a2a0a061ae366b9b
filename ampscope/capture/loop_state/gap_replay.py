"""Runs calls from between two steps again, on copies and under full observation: which op wrote what is not finite."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope import provenance
from ampscope.capture.changes.replay_change import EverythingIn
from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.loop_state.loop_calls import OVERWRITES, Gap
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import LookDepth, RerunEngine
from ampscope.capture.rerun.player import call_user
from ampscope.capture.tape.live_results import in_place_results
from ampscope.capture.tape.tape_entry import EarlierResult, Entry, OutsideTensor
from ampscope.capture.torch_support import call_state, tensor_tree, torch_private
from ampscope.capture.torch_support.call_state import random_state_kept
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.capture.tracing.light_statistics import finite
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import ENTRY_NODES, Node, Phase, Source, Trial, Trigger, source_of

#: What tensors from outside the calls are, and are called, by ``id``.
Names = dict[int, tuple[Node, str]]


class Traced(NamedTuple):
    """The record of calls that were run again."""

    rows: TracedRows
    first: list[int]  #: for each call that ran, in order, the sequence number of its first op
    entries: list[int]  #: the calls that ran, by number

    def call_of(self, seq: int) -> int:
        """Returns the number of an op's call; for a value from outside, of the call that read it first."""
        return self.entries[max(0, bisect_right(self.first, seq) - 1)]

    def counted_for(self, after: tuple[int, int]) -> TracedRows:
        """Returns the rows, labelled with a step and its optimizer."""
        step, optimizer = after
        return TracedRows(*self.rows.labelled(step, source_of(Source.WRITE, optimizer)), self.rows.sites)


class Closeups:
    """Runs calls from between two steps again and records what they did.

    Args:
        engine: Makes what observes them.
        recorder: Where rows go.
    """

    def __init__(self, engine: RerunEngine, recorder: Recorder) -> None:
        self.engine = engine
        self._recorder = recorder

    def names(self, gap: Gap) -> Names:
        """Returns what the carried tensors and weights that the calls read are, and are called, by ``id``."""
        carried = {key: (Node.CARRIED, name) for key, name in gap.names.items()}
        return carried | {key: (Node.PARAMETER, name) for key, (name, _) in self.engine.models.parameters.items()}

    def traced(
        self,
        gap: Gap,
        names: Names,
        sinks: list[tuple[str, EarlierResult]],
        weights: Mapping[int, Tensor] | None = None,
    ) -> Traced:
        """Runs the calls again that ``sinks`` are made of, or that are made of them, and returns what they did.

        Args:
            gap: The calls.
            names: Of what they read.
            sinks: The results in question, by name.
            weights: What the calls move, and more that they read, as it was before them, by ``id``; None where the
                sinks are no weights.

        Raises:
            Exception: Whatever the calls raise when they are run again.
        """
        tracer = self.engine.tracer(LookDepth.FULL)
        try:
            closeup = Closeup(gap, tracer, names, before=weights)
            if weights is not None:
                tracer.points.phase = Phase.OPTIMIZER
            closeup.play(sinks, Node.CARRIED_AFTER if weights is None else Node.WEIGHT_AFTER)
            rows = TracedRows(*tracer.rows(0, Source.WRITE), self._recorder.sites)
            return Traced(rows, list(closeup.began.values()), list(closeup.began))
        finally:
            tracer.release()

    def in_float32(self, gap: Gap, wanted: list[EarlierResult]) -> Trial:
        """Whether results are finite where the calls, and what they read and write, are float32.

        Args:
            gap: The calls.
            wanted: The results.
        """
        tracer = self.engine.tracer(LookDepth.RESULT)
        with Suppressed() as suppressed, EverythingIn(torch.float32).active(lambda: NOWHERE):
            found = Closeup(gap, tracer, {}, leaf=lambda _, tensor: wide(tensor)).rerun(wanted)
        tracer.release()
        if suppressed.error is not None:
            return Trial.UNAVAILABLE
        return Trial.FINITE if all(map(finite, found)) else Trial.NONFINITE

    def record(
        self,
        trigger: Trigger,
        after: tuple[int, int],
        rows: TracedRows | None,
        outcome: ReplayResult,
        evidence: Evidence,
    ) -> None:
        """Makes an incident of what the calls did, with their rows where there are any."""
        step, optimizer = after
        if rows is not None:
            self._recorder.trace(rows.ops, rows.edges, step, source_of(Source.WRITE, optimizer))
        self._recorder.incident(
            trigger,
            step=step,
            optimizer=optimizer,
            loss=None,
            scale=None,
            outcome=outcome,
            evidence=evidence,
        )


def wide(tensor: Tensor) -> Tensor:
    """A tensor in half precision as float32; any other itself."""
    return tensor.float() if tensor.dtype in HALF else tensor


def is_given(graph: provenance.Graph, seq: int) -> bool:
    """Whether an op hands on an infinity or NaN from outside, or one that stands in the loop's code."""
    numbers = {str(value).lstrip("-") for value in graph.scalars(seq).values()}
    return graph.site(seq).op in ENTRY_NODES or not numbers.isdisjoint(("inf", "nan"))


class Closeup:
    """One run over the calls between two steps.

    Args:
        gap: The calls.
        tracer: Observes every op.
        names: What a tensor from outside is called, and what it is, by ``id``.
        leaf: A copy of a tensor from outside, with its ``id``, as the calls read it.
        before: What is known of tensors from outside before the calls, by ``id``.
    """

    def __init__(
        self,
        gap: Gap,
        tracer: Tracer,
        names: Names,
        leaf: Callable[[int, Tensor], Tensor] = lambda _, tensor: tensor,
        *,
        before: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._leaf = leaf
        self._before = before or {}
        self._gap = gap
        self._tracer = tracer
        self._names = names
        self._copies: dict[int, Tensor] = {}
        self._results: dict[int, list[Tensor]] = {}
        self.began: dict[int, int] = {}  #: by number of a call that ran, what the tracer had counted before it

    def play(self, sinks: list[tuple[str, EarlierResult]], node: Node = Node.CARRIED_AFTER) -> None:
        """Runs what ``sinks`` are made of and what is made of them, and marks them, by name, for the walk back.

        Raises:
            Exception: Whatever the calls raise when they are run again.
        """
        with random_state_kept(), self._tracer.active():
            reading = self._gap.reading(source.entry for _, source in sinks)
            for number in self._gap.leading_to(reading):
                self._play(number, self._gap.tape[number])
        for name, source in sinks:
            module = name.rpartition(".")[0] if node is Node.WEIGHT_AFTER else ""
            self._tracer.sink(self._results[source.entry][source.leaf], node, name, module)

    def rerun(self, wanted: list[EarlierResult]) -> list[Tensor]:
        """Runs what ``wanted`` is made of, and gives it; nothing is marked.

        Raises:
            Exception: Whatever the calls raise when they are run again.
        """
        with random_state_kept(), torch.no_grad():
            for number in self._gap.leading_to(source.entry for source in wanted):
                self._play(number, self._gap.tape[number])
        return [self._results[source.entry][source.leaf] for source in wanted]

    def _play(self, number: int, entry: Entry) -> None:
        written = next(iter(entry.arguments.tensors), None)
        if number in self._gap.unknown and getattr(written, "identity", None) not in self._before:
            raise RuntimeError("what a call had overwritten was not kept")
        overwrites = entry.in_place and getattr(entry.call, "__name__", "") in OVERWRITES
        target = written if overwrites else None
        self._tracer.pause.on = True
        args, kwargs = entry.arguments.resolved(lambda each: self._tensor(each, overwritten=each is target))
        self._tracer.pause.on = False
        self._tracer.places.entry_place = entry.place
        self.began[number] = len(self._tracer.outputs.ops)
        with entry.state.ambient.entered(), call_state.kernels_chosen(entry.state.kernels):
            result = call_user(entry.call, args, kwargs)
        left = in_place_results(args, kwargs, result) if entry.in_place else tensor_tree.tensors(result)
        self._results[number] = list(left)

    def _tensor(self, reference: Any, *, overwritten: bool) -> Tensor:
        if isinstance(reference, EarlierResult):
            return self._results[reference.entry][reference.leaf]
        known = self._copies.get(reference.identity)
        if known is None:
            kept = self._before.get(reference.identity)
            copy = _copy(reference, overwritten=overwritten) if kept is None else kept.clone()
            known = self._copies[reference.identity] = self._leaf(reference.identity, copy)
            node, name = self._names.get(reference.identity, (Node.INPUT, "a tensor of the loop's"))
            self._tracer.name_entry(known, node, name)
        return known


def _copy(reference: OutsideTensor, *, overwritten: bool) -> Tensor:
    """Copies a tensor that a call read; of one that it only overwrites, the finite numbers that are there now."""
    tensor = reference.tensor.detach()
    if overwritten:
        return torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor))
    if torch_private.version_counter(reference.tensor) != reference.version:
        raise RuntimeError("an operand was changed since")
    return tensor.clone()
