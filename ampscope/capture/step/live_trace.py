"""Traces some of the real steps as they run, and keeps of them what is worth keeping."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ampscope import provenance
from ampscope.capture.budgets import TraceBudget
from ampscope.capture.events import BackwardCall, ModuleCall, StepAttempt, StepObserver, StepStart
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.step import gradients
from ampscope.capture.step.sampled_step import SampledSteps
from ampscope.capture.tape.functional_calls import named_inputs
from ampscope.capture.torch_support.backward_call import backward_roots, creates_graph
from ampscope.capture.torch_support.guard import Guard, surely
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.torch_support.tensor_tree import HALF, torch_dtype
from ampscope.capture.torch_support.torch_private import past_modes
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.distinct_values import CastBefore, CastsBefore
from ampscope.capture.tracing.traced_rows import BadFlow
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.schema import EdgeRow, Node, OpRow, Phase, Source, source_of


class Collapsed(NamedTuple):
    """A cast that made few values of many."""

    values: provenance.DistinctValues
    before: CastBefore | None  #: the cast, where the loop made it before the step
    since: int  #: the first step that read such values


class LiveTrace(StepObserver):
    """The trace of the step in progress, if it is one of those that are traced.

    Args:
        models: The watched models.
        recorder: Where traces go.
        terminal: Where the user is told of what will overflow.
        budget: Which steps are traced.
        pause: On while AMPscope's own code computes.
        guard: Catches faults of the tracer.
    """

    def __init__(
        self,
        models: Models,
        recorder: Recorder,
        terminal: Terminal,
        budget: TraceBudget,
        pause: Pause,
        guard: Guard,
    ) -> None:
        self._models = models
        self._recorder = recorder
        self._budget = budget
        self._pause = pause
        self.casts = CastsBefore()  #: what the loop casts before a step; told by whoever listens there
        self.guard = guard
        self._tracer: Tracer | None = None
        self._slots = light_statistics.Slots()  # of one traced step after the other
        self.number = 0  #: of the step in progress
        self._sampled = SampledSteps(models, recorder, terminal)
        self._half_since: dict[tuple[str, torch.dtype], int] = {}  # inputs in half precision: the first such step
        self._collapse_told = False
        self.collapsed: dict[int, Collapsed] = {}  #: casts for the step settled last that lost values
        self.began = False  #: the step in progress was traced from its start, whatever became of that
        self._harmless: BadFlow | None = (
            None  # of the latest step with bad values, if they did not vanish in a division
        )
        self._dropped: list[Tracer] = []  # while torch held them off its stack; to be removed later

    @property
    def active(self) -> bool:
        """Whether the step in progress is traced."""
        return self._tracer is not None

    @property
    def broken(self) -> bool:
        """Whether the tracer has switched itself off."""
        return self.guard.broken

    def sweep(self) -> bool:
        """Removes tracers that could not be removed when they were dropped; returns whether none is left."""
        dropped, self._dropped = self._dropped, []
        for tracer in dropped:
            if tracer.handling:
                self._dropped.append(tracer)
            else:
                surely(tracer.remove)
        return not self._dropped

    def step_began(self, start: StepStart) -> None:
        """Begins to trace, if this is one of the steps that are."""
        self.began, self.number = False, start.number
        if not self._budget.wants(start.number) or self._models.compiled or self.guard.broken:
            return
        self._slots.restart()
        sites, names, guard = self._recorder.sites, self._models.names, self.guard
        tracer = Tracer(sites, names, full=False, guard=guard, pause=self._pause, slots=self._slots)
        for name, parameter in self._models.parameters.values():
            tracer.name_entry(parameter, Node.PARAMETER, name)
        for module, name, buffer in self._models.buffers():
            tracer.name_entry(buffer, Node.BUFFER, ".".join(filter(None, (module, name))))
        tracer.outputs.casts_before = self.casts
        if self._budget.is_full(start.number):
            self._sampled.begins(tracer)
        self._tracer, self.began = tracer, True
        tracer.insert()

    def call_began(self, call: ModuleCall) -> None:
        """Names the inputs of a watched module."""
        if self._tracer is not None:
            for name, tensor in named_inputs(call.args, call.kwargs):
                self._tracer.name_entry(tensor, Node.INPUT, name)
                if tensor.dtype in HALF:
                    self._half_since.setdefault((name, tensor.dtype), self.number)

    def call_lost(self, call: ModuleCall) -> None:
        """A step with a call that failed is not worth its trace."""
        self.drop()

    def backward_began(self, backward: BackwardCall) -> None:
        """Goes on through the backward, unless being watched would change its bits."""
        if self._tracer is not None:
            self._sampled.backward_begins()
            self._tracer.functions.creates_graph = creates_graph(backward.args, backward.kwargs)
            self._tracer.places.marked.read(backward_roots(backward.args, backward.kwargs))
            if self._tracer.backward_varies:  # the real step's bits come first: only its forward is traced
                surely(self._tracer.remove)

    def backward_ended(self) -> None:
        """Begins the next micro-batch, for what follows a backward belongs to it."""
        if self._tracer is not None:
            self._tracer.outputs.begin_micro_batch()

    def gradients_complete(self) -> None:
        """Ends the trace. The optimizer's own ops matter where parameters are kept in half precision."""
        self.sweep()
        if self._tracer is not None:
            self._sampled.gradients(self._tracer)
            if self._half_parameters():
                self._tracer.points.phase = Phase.OPTIMIZER
            else:
                surely(self._tracer.remove)

    def abandoned(self, reason: str) -> None:
        """Forgets the step."""
        self.drop()

    def _half_parameters(self) -> bool:
        past_dispatch, past_functions = past_modes()
        with past_dispatch, past_functions:  # the tracer's own function mode would hear of each
            return not HALF.isdisjoint([p.dtype for _, p in self._models.parameters.values()])

    def drop(self) -> None:
        """Stops tracing and forgets the step."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.pause = Pause(on=True)
            surely(tracer.remove)
            self._let_go(tracer)

    def _let_go(self, tracer: Tracer) -> None:
        tracer.release()
        if tracer.handling:  # the loop is inside a function that it sees, and torch puts it back afterwards
            tracer.pause = Pause(on=True)
            self._dropped.append(tracer)

    def poisoned_weights(self, *, of_any_dtype: bool = False) -> list[str]:
        """Parameters that the traced optimizer step made non-finite; they are marked for the walk back.

        Args:
            of_any_dtype: Look at them also where none is kept in half precision.
        """
        if self._tracer is None or not (of_any_dtype or self._half_parameters()):
            return []
        surely(self._tracer.remove)
        bad = [(name, p) for name, p in self._models.parameters.values() if not light_statistics.finite(p)]
        for name, parameter in bad:
            self._tracer.sink(parameter.detach(), Node.WEIGHT_AFTER, name)
        return [name for name, _ in bad]

    def bad_flow(self) -> BadFlow | None:
        """Tells where the bad values of the traced step go so far, if it has any; waits for the device."""
        return self._tracer.bad_flow() if self._tracer is not None else None

    def graph(self) -> provenance.Graph:
        """The ops of the traced step so far; waits for the device."""
        rows = self._tracer.rows(self.number, "") if self._tracer is not None else ([], [])
        return provenance.Graph(*rows, self._recorder.sites.row)

    def write_incident(self, attempt: StepAttempt) -> None:
        """Writes the trace of a bad step, with the walk's starting points marked."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        surely(tracer.remove)
        for loss in attempt.opened.losses:
            tracer.sink(loss, Node.LOSS, "loss")
        for name, gradient in gradients.owned(attempt.optimizer, self._models):
            if not light_statistics.finite(gradient):
                tracer.sink(gradient, Node.GRADIENT, name, name.rpartition(".")[0])
        ops, edges = tracer.rows(attempt.step, source_of(Source.LIVE, attempt.index))
        self._write(*self._sampled.without(tracer, ops, edges), attempt)
        self._let_go(tracer)

    def settle(self, attempt: StepAttempt, count: int) -> list[int]:
        """Writes or drops the trace of a step without incident.

        Returns:
            Sequence numbers of overflows that vanished again before loss and gradients: an incident after all.
        """
        self.collapsed = {}
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return []
        surely(tracer.remove)
        keep = self._budget.keeps(count)
        counted = keep and not self._collapse_told and tracer.outputs.distinct.read()
        finite, source = tracer.outputs.all_finite(), source_of(Source.LIVE, attempt.index)
        self._sampled.state(tracer, attempt.optimizer)
        flow = None if finite else tracer.bad_flow()
        if (finite or flow == self._harmless) and not tracer.outputs.came_cast and not counted:
            columns = self._sampled.columns(tracer, attempt, source) if keep or not finite else None
            if keep and columns is not None:  # nobody walks along its rows
                self._write(*columns, attempt)
                self._budget.kept(steps_left=self._sampled.steps_left)
                if not self._collapse_told:
                    self.casts.forget()
            self._let_go(tracer)
            return []
        ops, edges = self._sampled.rows(tracer, attempt, source)
        graph = provenance.Graph(ops, edges, self._recorder.sites.row)
        absorbed = provenance.absorbed(graph)
        self._harmless = flow if not absorbed and len(ops) == len(tracer.outputs.measurements) else None
        if not absorbed and (keep or tracer.outputs.came_cast):
            self.collapsed = self._collapsed(graph, tracer, attempt.step)
        if absorbed or self.collapsed:
            self._write(ops, edges, attempt)
        elif keep:
            self._write(*self._recorder.selection.rows(ops, edges), attempt)
        if keep and not absorbed:
            self._budget.kept(steps_left=self._sampled.steps_left)
        self._let_go(tracer)
        return [origin.seq for origin in absorbed]

    def _collapsed(self, graph: provenance.Graph, tracer: Tracer, step: int) -> dict[int, Collapsed]:
        """Returns the casts that made few values of many, by sequence number; once a run."""
        if self._collapse_told:
            return {}
        counts, came_cast = tracer.outputs.distinct.read(), tracer.outputs.came_cast
        found = {}
        for seq, values in provenance.collapsed(graph, counts).items():
            cast, since = came_cast.get(seq), step
            if cast is not None:
                first = self._half_since.get((graph.site(seq).name, torch_dtype(cast.dtype)), self.number)
                since -= self.number - first
            found[seq] = Collapsed(values, cast, since)
        self.casts.forget()
        self._collapse_told = bool(found)
        return found

    def _write(self, ops: list[OpRow] | ColumnBlock, edges: list[EdgeRow] | ColumnBlock, attempt: StepAttempt) -> None:
        attempt.traced = source_of(Source.LIVE, attempt.index)
        self._recorder.trace(ops, edges, attempt.step, attempt.traced)
