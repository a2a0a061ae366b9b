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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.changes.replay_change import EverythingIn, ReplayChange
from ampscope.capture.checks import audited_ops
from ampscope.capture.checks.audit_reference import ReferenceSamples, sampled
from ampscope.capture.checks.audited_ops import OTHER_DRAWS, Errors, OpErrors
from ampscope.capture.checks.check import Asks, Check, CheckContext, Reruns
from ampscope.capture.events import EndedStep, RunEnd, StepAttempt
from ampscope.capture.isolation import memory
from ampscope.capture.record.configuration import AuditRequests
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.rerun import obstacles
from ampscope.capture.rerun.engine import LookDepth, Ran, Rerun
from ampscope.capture.rerun.player import Player
from ampscope.capture.step import gradients
from ampscope.capture.tape.fingerprints import Differences
from ampscope.capture.tape.tape_entry import Entry
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.backward_call import creates_graph
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import torch_dtype
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


#: The rows of an audit.
Made = tuple[AuditRow, list[AuditOpRow]]


class MeasuredPlayer(Player):
    """Plays a step whose ops are measured: the gradients of the loss tell what their errors do to it."""

    @property
    def errors(self) -> OpErrors:
        """Listens to its ops."""
        errors = self._tracer.keeper
        assert isinstance(errors, OpErrors)
        return errors

    def _play_entry(self, index: int, entry: Entry) -> None:
        errors = self.errors
        errors.settle()
        args, kwargs = entry.arguments.args, entry.arguments.kwargs
        gives = bool(self._step.given) and entry.call is torch.autograd.grad
        errors.counts = gives and not creates_graph(args, kwargs)
        try:
            super()._play_entry(index, entry)
        finally:
            errors.counts = False

    def _backward(self, entry: Entry, args: Any, kwargs: Any) -> None:
        errors = self.errors
        errors.settle()
        errors.counts = not creates_graph(args, kwargs)  # else they are a step on the way to the loss
        try:
            super()._backward(entry, args, kwargs)
        finally:
            errors.counts = False


def total_loss(losses: Sequence[Tensor]) -> float | None:
    """The sum of losses; None where one has several elements, or where there is none."""
    alone = all(loss.numel() == 1 for loss in losses)
    return math.fsum(loss.item() for loss in losses) if losses and alone else None


RECEIVED = "the step uses values from other ranks: what those would have sent in the reference dtype cannot be known"

EAGERLY = "what torch.compile compiled was run eagerly, op by op, which may round where the compiled code does not"

MOVED = "the loop had moved the weights when AMPscope could first look"


class Audit(Check):
    """Audits the steps that were asked for.

    Args:
        context: What it needs of its run.
        requests: Which steps are to be audited.
        terminal: Where the user is told.
    """

    needs_tape = False

    def __init__(self, context: CheckContext, requests: AuditRequests, terminal: Terminal) -> None:
        super().__init__(context)
        self._requests = requests
        self._terminal = terminal
        self._told: set[str] = set()

    def affords(self) -> bool:
        """Whether it may be made: it was asked for."""
        return True

    def due(self, attempt: StepAttempt) -> Asks | None:
        """Whether an audit is due, and this step is healthy."""
        dtype = "" if self.guard.broken else self._requests.due(attempt.step, attempt.index)
        return self._asks(attempt, dtype) if dtype else None

    def step_ended(self, ended: EndedStep) -> None:
        """Audits the step, if one is due, where no optimizer but the loop itself is about to move the weights."""
        attempt = ended.attempt
        if attempt.bad or self.guard.broken or not (attempt.by_hand or attempt.late):
            return
        dtype = self._requests.due(attempt.step, attempt.index)
        if dtype and attempt.by_hand:
            self.ask(attempt, self._asks(attempt, dtype))
        elif dtype:
            self._write(attempt, (self._row(attempt, dtype, AuditStatus.UNAVAILABLE, MOVED), []), time.perf_counter())

    def run_ended(self, _: RunEnd) -> None:
        """Says so where an audit was asked for and no healthy step came."""
        if self._requests.waiting:
            text = "an audit was asked for, and no healthy step came after that"
            self.recorder.event(EventKind.NOTE, max(self.recorder.next_step.values(), default=0), text)
            self._terminal.once("audit-waiting", text)

    def _asks(self, attempt: StepAttempt, dtype: str) -> Asks:
        started = time.perf_counter()
        made = yield from self._made(attempt, dtype)
        if made is not None:
            self._write(attempt, made, started)
        return None

    def _write(self, attempt: StepAttempt, made: Made, started: float) -> None:
        row, ops = made
        self._requests.served(attempt.step, attempt.index)
        self.recorder.audit(row._replace(seconds=time.perf_counter() - started), ops)
        self._tell(row)

    def _made(self, attempt: StepAttempt, due: str) -> Reruns[Made | None]:
        """The rows of an audit; None where the step turns out not to be healthy."""
        if self.tape.guard.broken:
            return self._row(attempt, due, AuditStatus.UNAVAILABLE, "the step tape had switched itself off"), []
        models, dtype = self.engine.models, torch_dtype(due)
        recording = self.tape.recording()._replace(scale=attempt.scale)
        obstacle = obstacles.why_not(recording, models) or memory.obstacle(models)
        obstacle = obstacle or (RECEIVED if recording.has_received() else "")
        if obstacle:
            return self._row(attempt, due, AuditStatus.UNAVAILABLE, obstacle), []
        reference: Reference = yield from self._reference(recording, dtype)
        found: list[Player] = []
        keepers: list[OpErrors] = []

        def keeper(tracer: Tracer) -> OpErrors:
            keepers.append(OpErrors(tracer, reference.samples, dtype, self.guard))
            return keepers[-1]

        ran: Ran = yield Rerun(
            recording,
            ReplayChange(),
            LookDepth.FULL,
            asked_for=frozenset(gradients.names(attempt.optimizer, models)),
            keeper=keeper,
            player=MeasuredPlayer,
            sink=found.append,
            share_of_room=_SHARE_OF_ROOM,
            label=(attempt.step, source_of(Source.AUDIT, attempt.index)),
            is_paid=False,
        )
        try:
            compiled = models.compiled
            reason = ran.reason or _not_the_step(found[0].differences, compiled=compiled)
            if reason := reason or (FAILED if self.guard.broken else ""):
                return self._row(attempt, due, AuditStatus.UNAVAILABLE, reason), []
            return self._measured(attempt, due, reference, ran, found[0], keepers[0]) if found[0].finite else None
        finally:
            for each in keepers:
                each.release()

    def _reference(self, step: TapedStep, dtype: torch.dtype) -> Reruns[Reference]:
        """Runs the step in a wider dtype; nothing of it is recorded."""
        models, change = self.engine.models, EverythingIn(dtype)
        if not memory.fits(memory.of_weights(models, change.dtype), models.main_device()):
            return Reference(reason=memory.NO_ROOM)
        keepers: list[ReferenceSamples] = []
        losses: list[Tensor] = []
        gradients: dict[str, Tensor | None] = {}
        missed = False

        def keeper(tracer: Tracer) -> ReferenceSamples:
            keepers.append(ReferenceSamples(tracer))
            return keepers[-1]

        def sink(player: Player) -> None:
            nonlocal missed
            missed = bool(player.draws.missed)
            losses.extend(player.losses)
            gradients.update({name: sampled(local(each)) for name, each in player.gradients().items()})

        ran: Ran = yield Rerun(step, change, keeper=keeper, sink=sink, is_paid=False)
        if ran.reason or self.guard.broken:
            return Reference(reason=ran.reason or FAILED)
        if missed and not step.draws:  # once more, for what it draws is not known before it has been run
            yield Rerun(step, ReplayChange(), is_paid=False)
            if step.draws:
                return (yield from self._reference(step, dtype))
        return Reference(keepers[0], gradients, total_loss(losses))

    def _measured(
        self, attempt: StepAttempt, due: str, reference: Reference, ran: Ran, player: Player, errors: OpErrors
    ) -> Made:
        step, source = attempt.step, source_of(Source.AUDIT, attempt.index)
        pairs = {name: (reference.gradients.get(name), gradient) for name, gradient in player.gradients().items()}
        found = audited_ops.errors_of(errors, ran.rows, pairs, ran.scale)
        self.recorder.trace(ran.rows.ops, ran.rows.edges, step, source)
        loss = total_loss(player.losses)
        status, reason = _status(reference, ran, found, compiled=self.engine.models.compiled)
        row = self._row(attempt, due, status, reason)._replace(
            source=source,
            loss=None if loss is None else loss / ran.scale,
            reference_loss=None if reference.loss is None else reference.loss / ran.scale,
            explained=found.explained,
            ops=errors.rerun,
            not_measured=errors.not_measured.total(),
            not_measured_ops=tuple(errors.not_measured),
        )
        return row, found.rows

    def _row(self, attempt: StepAttempt, due: str, status: AuditStatus, reason: str) -> AuditRow:
        """The row of an audit of which nothing is known but this."""
        return AuditRow(
            step=attempt.step,
            optimizer=attempt.index,
            segment=self.recorder.segment,
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


def _not_the_step(differences: Differences, *, compiled: bool) -> str:
    """Why what was run is another step; else empty.

    As where the loop has moved the weights between two evaluations, or where compiled code keeps wide what ops round.
    """
    words = "; ".join(dict.fromkeys(differences.found))
    is_other = differences.held_otherwise or not differences.are_rounding
    hint = f"; {EAGERLY}: audit a step without torch.compile" if compiled else ""
    return f"a replay is not the step: {words}{hint}" if is_other else ""


def _status(reference: Reference, ran: Ran, errors: Errors, *, compiled: bool) -> tuple[AuditStatus, str]:
    """How far the audit came, and why no further; with what the replay differs in from the step."""
    missing = reference.reason and f"the step could not be run in the reference dtype: {reference.reason}"
    missing = missing or ("" if errors.same_draws else OTHER_DRAWS)
    differs = "; ".join(ran.differences)
    differs = differs and f"the replay differs from the step: {differs}"
    reason = "; ".join(filter(None, [missing, EAGERLY if compiled else "", differs]))
    return AuditStatus.PARTIAL if missing else AuditStatus.DONE, reason
