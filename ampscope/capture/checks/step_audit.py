"""Audits healthy steps: what each op loses by its dtype, apart from what it inherited, and what that does to the loss.

Before the weights move, the step is run again twice: in float32 or float64, the reference, of which a sample of each
op's result is kept; and as it was, where each op is run once more on its own operands, widened. The difference is its
own error. What it gives on its own operands in the reference dtype against what the reference step has at the same
place is the error that it inherited. Its own error times the gradient at that place, which the same replay's backward
brings, is what it adds to the loss's error, to first order. Of values that ask for no gradient none comes: what the
batch loses by its own cast is not in the sum.

The dtypes are compared as the training's settings have them: a float32 whose matrix products run in TF32 is one.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.changes.replay_change import EverythingIn, ReplayChange
from ampscope.capture.checks import audited_ops
from ampscope.capture.checks.audit_reference import ReferenceSamples, sampled
from ampscope.capture.checks.audited_ops import OTHER_DRAWS, Errors, OpErrors
from ampscope.capture.events import EndedStep, RunEnd, StepAttempt, StepObserver
from ampscope.capture.isolation import memory
from ampscope.capture.record.configuration import AuditRequests
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.rerun import player, step_replay
from ampscope.capture.rerun.player import Player
from ampscope.capture.step import gradients
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.tape_entry import Entry
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.backward_call import creates_graph
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import torch_dtype
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import AuditOpRow, AuditRow, AuditStatus, EventKind, Source, source_of

#: Beside what the step itself keeps, the errors of all that its forward gives are kept until backward has come by.
_SHARE_OF_ROOM = 2
FAILED = "the audit itself failed; the run's events say why"


class Reference(NamedTuple):
    """The step in the reference dtype."""

    samples: ReferenceSamples | None = None  #: None where it could not be run
    gradients: Mapping[str, Tensor | None] = {}  #: a sample of each parameter's; scaled where the step is
    loss: float | None = None  #: likewise
    reason: str = ""  #: why it could not be run


class Faithful(NamedTuple):
    """The step as it was."""

    errors: OpErrors
    tracer: Tracer
    player: Player
    reason: str = ""  #: why it could not be run

    def release(self) -> None:
        """Lets go of every tensor."""
        self.errors.release()
        self.tracer.release()


class MeasuredPlayer(Player):
    """Plays a step whose ops are measured: the gradients of the loss tell what their errors do to it."""

    errors: OpErrors

    def _play_entry(self, index: int, entry: Entry) -> None:
        self.errors.settle()
        args, kwargs = entry.arguments.args, entry.arguments.kwargs
        gives = bool(self._step.given) and entry.call is torch.autograd.grad
        self.errors.counts = gives and not creates_graph(args, kwargs)
        try:
            super()._play_entry(index, entry)
        finally:
            self.errors.counts = False

    def _backward(self, entry: Entry, args: Any, kwargs: Any) -> None:
        self.errors.settle()
        self.errors.counts = not creates_graph(args, kwargs)  # else they are a step on the way to the loss
        try:
            super()._backward(entry, args, kwargs)
        finally:
            self.errors.counts = False


def run_in_reference(step: TapedStep, models: Models, dtype: torch.dtype, guard: Guard) -> Reference:
    """Runs the step in a wider dtype; nothing of it is recorded.

    Args:
        step: The step.
        models: The watched models.
        dtype: In place of every narrower one.
        guard: Catches faults of the tracer.
    """
    change, device = EverythingIn(dtype), models.main_device()
    if not memory.fits(memory.of_weights(models, change.dtype), device):
        return Reference(reason=memory.NO_ROOM)
    tracer = Tracer(Sites(0, models.module_type), models.names, full=True, guard=guard, stops=_stops())
    tracer.keeper = samples = ReferenceSamples(tracer)
    played = Player(step, models, tracer, change)
    failed = step_replay.play(played, memory.room(device))
    try:
        if failed or guard.broken:
            return Reference(reason=failed or FAILED)
        if played.draws.missed and not step.draws:  # once more, for what it draws is not known before it has been run
            as_it_was = Tracer(Sites(0, models.module_type), models.names, full=False, guard=guard, stops=_stops())
            step_replay.play(Player(step, models, as_it_was, ReplayChange()), memory.room(device))
            as_it_was.release()
            if step.draws:
                return run_in_reference(step, models, dtype, guard)
        gradients = {name: sampled(local(each)) for name, each in played.gradients().items()}
        return Reference(samples, gradients, total_loss(played.losses))
    finally:
        tracer.release()


def run_faithfully(
    step: TapedStep,
    models: Models,
    of: Reference,
    dtype: torch.dtype,
    sites: Sites,
    *,
    guard: Guard,
    names: Iterable[str],
) -> Faithful:
    """Runs the step as it was, and measures each of its ops.

    Args:
        step: The step.
        models: The watched models.
        of: What to compare with.
        dtype: Of the reference, in which each op is run again.
        sites: Numbers the program points.
        guard: Catches faults of the tracer.
        names: Parameters whose gradients are marked in the trace.
    """
    tracer = Tracer(sites, models.names, full=True, guard=guard, stops=_stops())
    tracer.keeper = errors = OpErrors(tracer, of.samples, dtype, guard)
    played = MeasuredPlayer(step, models, tracer, ReplayChange(), asked_for=frozenset(names))
    played.errors = errors
    room = memory.room(models.main_device())
    failed = step_replay.play(played, None if room is None else room // _SHARE_OF_ROOM)
    return Faithful(errors, tracer, played, failed)


def total_loss(losses: Sequence[Tensor]) -> float | None:
    """The sum of losses; None where one has several elements, or where there is none."""
    alone = all(loss.numel() == 1 for loss in losses)
    return math.fsum(loss.item() for loss in losses) if losses and alone else None


def _stops() -> Any:
    return (player.call_user.__code__,)


RECEIVED = "the step uses values from other ranks: what those would have sent in the reference dtype cannot be known"

EAGERLY = "what torch.compile compiled was run eagerly, op by op, which may round where the compiled code does not"

MOVED = "the loop had moved the weights when AMPscope could first look"


class Audit(StepObserver):
    """Audits the steps that were asked for.

    Args:
        models: The watched models.
        recorder: Where rows go.
        requests: Which steps are to be audited.
        tape: What a replay needs.
        cycle: Where the step is.
        terminal: Where the user is told.
        guard: Catches faults of auditing.
    """

    def __init__(
        self,
        models: Models,
        recorder: Recorder,
        requests: AuditRequests,
        tape: StepTape,
        cycle: StepCycle,
        terminal: Terminal,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._models = models
        self._recorder = recorder
        self._requests = requests
        self._tape = tape
        self._cycle = cycle
        self._terminal = terminal
        self._told: set[str] = set()

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Audits the step, if one is due and this one is healthy."""
        if due := self._due(attempt):
            self._audit(attempt, due)

    def step_ended(self, ended: EndedStep) -> None:
        """Audits the step, if one is due, where no optimizer but the loop itself is about to move the weights."""
        attempt = ended.attempt
        due = self._due(attempt)
        if due and attempt.by_hand:
            self._audit(attempt, due)
        elif due and attempt.late:
            self._write(attempt, (self._row(attempt, due, AuditStatus.UNAVAILABLE, MOVED), []), time.perf_counter())

    def _due(self, attempt: StepAttempt) -> str:
        unfit = attempt.bad or self.guard.broken
        return "" if unfit else self._requests.due(attempt.step, attempt.index)

    def _audit(self, attempt: StepAttempt, due: str) -> None:
        started = time.perf_counter()
        with self._cycle.inside(State.JUDGING):
            made = self._made(attempt, due)
        if made is not None:
            self._write(attempt, made, started)

    def _write(self, attempt: StepAttempt, made: tuple[AuditRow, list[AuditOpRow]], started: float) -> None:
        row, ops = made
        self._requests.served(attempt.step, attempt.index)
        seconds = time.perf_counter() - started
        attempt.judging_s += seconds
        self._recorder.audit(row._replace(seconds=seconds), ops)
        self._tell(row)

    def run_ended(self, _: RunEnd) -> None:
        """Says so where an audit was asked for and no healthy step came."""
        if self._requests.waiting:
            text = "an audit was asked for, and no healthy step came after that"
            self._recorder.event(EventKind.NOTE, max(self._recorder.next_step.values(), default=0), text)
            self._terminal.once("audit-waiting", text)

    def _made(self, attempt: StepAttempt, due: str) -> tuple[AuditRow, list[AuditOpRow]] | None:
        """The rows of an audit; None where the step turns out not to be healthy."""
        if self._tape.guard.broken:
            return self._row(attempt, due, AuditStatus.UNAVAILABLE, "the step tape had switched itself off"), []
        recording = self._tape.recording()._replace(scale=attempt.scale)
        obstacle = step_replay.why_not(recording, self._models) or memory.obstacle(self._models)
        obstacle = obstacle or (RECEIVED if recording.has_received() else "")
        if obstacle:
            return self._row(attempt, due, AuditStatus.UNAVAILABLE, obstacle), []
        reference = run_in_reference(recording, self._models, torch_dtype(due), self.guard)
        names = gradients.names(attempt.optimizer, self._models)
        found = run_faithfully(
            recording, self._models, reference, torch_dtype(due), self._recorder.sites, guard=self.guard, names=names
        )
        try:
            reason = (
                found.reason
                or _not_the_step(found, compiled=self._models.compiled)
                or (FAILED if self.guard.broken else "")
            )
            if reason:
                return self._row(attempt, due, AuditStatus.UNAVAILABLE, reason), []
            return self._measured(attempt, due, recording, reference, found) if found.player.finite else None
        finally:
            found.release()

    def _measured(
        self, attempt: StepAttempt, due: str, recording: TapedStep, reference: Reference, found: Faithful
    ) -> tuple[AuditRow, list[AuditOpRow]]:
        source, scale = source_of(Source.AUDIT, attempt.index), recording.scale or 1.0
        traced = TracedRows(*found.tracer.rows(attempt.step, source), self._recorder.sites)
        ours = found.player.gradients()
        pairs = {name: (reference.gradients.get(name), gradient) for name, gradient in ours.items()}
        errors = audited_ops.errors_of(found.errors, traced, pairs, scale)
        self._recorder.trace(traced.ops, traced.edges, attempt.step, source)
        loss = total_loss(found.player.losses)
        row = self._row(attempt, due, *_status(reference, found, errors, compiled=self._models.compiled))._replace(
            source=source,
            loss=None if loss is None else loss / scale,
            reference_loss=None if reference.loss is None else reference.loss / scale,
            explained=errors.explained,
            ops=found.errors.rerun,
            not_measured=found.errors.not_measured.total(),
            not_measured_ops=tuple(found.errors.not_measured),
        )
        return row, errors.rows

    def _row(self, attempt: StepAttempt, due: str, status: AuditStatus, reason: str) -> AuditRow:
        """The row of an audit of which nothing is known but this."""
        return AuditRow(
            step=attempt.step,
            optimizer=attempt.index,
            segment=self._recorder.segment,
            time=time.time(),
            dtype=due,
            status=status,
            reason=reason,
            source="",
            loss=None,
            reference_loss=None,
            explained=None,
            ops=0,
            not_measured=0,
            not_measured_ops=(),
            seconds=0.0,
        )

    def _tell(self, row: AuditRow) -> None:
        """Prints one line for the first audit, and one for each reason why one cannot be made."""
        text = f"step {row.step} was audited. Look: ampscope audit {self._terminal.shown}"
        key = "audit"
        if row.status == AuditStatus.UNAVAILABLE:
            text = f"step {row.step} could not be audited: {row.reason}"
            key = f"audit-{hashlib.sha256(row.reason.encode()).hexdigest()[:8]}"
        if key not in self._told:
            self._told.add(key)
            self._terminal.once(key, text)


def _not_the_step(found: Faithful, *, compiled: bool) -> str:
    """Why what was run is another step; else empty.

    As where the loop has moved the weights between two evaluations, or where compiled code keeps wide what ops round.
    """
    differences = found.player.differences
    words = "; ".join(dict.fromkeys(differences.found))
    is_other = differences.held_otherwise or not differences.are_rounding
    hint = f"; {EAGERLY}: audit a step without torch.compile" if compiled else ""
    return f"a replay is not the step: {words}{hint}" if is_other else ""


def _status(reference: Reference, found: Faithful, errors: Errors, *, compiled: bool) -> tuple[AuditStatus, str]:
    """How far the audit came, and why no further; with what the replay differs in from the step."""
    missing = reference.reason and f"the step could not be run in the reference dtype: {reference.reason}"
    missing = missing or ("" if errors.same_draws else OTHER_DRAWS)
    differs = "; ".join(dict.fromkeys(found.player.differences.found))
    differs = differs and f"the replay differs from the step: {differs}"
    reason = "; ".join(filter(None, [missing, EAGERLY if compiled else "", differs]))
    return AuditStatus.PARTIAL if missing else AuditStatus.DONE, reason
