"""Follows one optimizer step after another: what belongs to it, when it ends, and whether it went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.budgets import ReplayBudget, TraceBudget
from ampscope.capture.hooks import process_hooks
from ampscope.capture.record.run_recorder import Evidence, Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.replay.player import Recording
from ampscope.capture.replay.step_replay import Outcome, Symptom
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.replay.tape import Entry, backward_roots, creates_graph
from ampscope.capture.replay.tape_mode import TapeMode
from ampscope.capture.step import gradients, lost_updates
from ampscope.capture.step.attempt import ScaleState, StepAttempt, StepRows
from ampscope.capture.step.buffer_health import BufferWatch
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.optimizers import Optimizers
from ampscope.capture.torch_support import call_state, tensor_tree
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel, Readback
from ampscope.capture.torch_support.torch_private import OthersAside, scaler_found_inf, steps_on_device
from ampscope.capture.torch_support.user_line import NOWHERE, Place, user_place
from ampscope.capture.tracing.tracer import FunctionWatch, Tracer
from ampscope.capture.usage.usage_watch import UsageWatch
from ampscope.trace.schema import ReplayStatus, Trigger
from ampscope.trace.vocabulary import Cause, MistakeForm

#: Attempts until which another optimizer is expected to show up.
FIRST_TURNS = 4
#: Steps in which is learned what forward does besides computing: change weights, draw from Python's generators.
LEARNED_STEPS = 2


def _is_ours(mode: object) -> bool:
    return isinstance(mode, (TapeMode, Tracer, FunctionWatch))


class _Own:
    """A stretch of AMPscope's own work: guarded, timed, and seen neither by the trace nor by modes of the user's."""

    __slots__ = ("_aside", "_guard", "_started", "_steps")

    def __init__(self, steps: StepWatch, guard: Guard) -> None:
        self._steps = steps
        self._aside = OthersAside(_is_ours)
        self._guard = guard
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._steps.pause(paused=True)
        self._aside.__enter__()

    def __exit__(self, *error: Any) -> bool:
        self._aside.__exit__()
        caught = self._guard.__exit__(*error)
        self._steps.pause(paused=False)
        self._steps.observing += time.perf_counter() - self._started
        return caught


class _Undecided(NamedTuple):
    """An attempt whose optimizer decides on the device, with what its replay needs, until the decision arrives."""

    attempt: StepAttempt
    decision: Parcel
    recording: Recording


class StepWatch:
    """The step in progress.

    Args:
        models: The watched models.
        recorder: Where rows go.
        guard_for: Makes the guard of a part.
        budgets: Which steps are traced, which incidents replayed.
        terminal: Where the user is told.
    """

    def __init__(
        self,
        models: Models,
        recorder: Recorder,
        guard_for: Callable[[str], Guard],
        budgets: tuple[TraceBudget, ReplayBudget],
        terminal: Terminal,
    ) -> None:
        self._models = models
        self._recorder = recorder
        self._terminal = terminal
        self._budget = budgets[0]
        self._types = call_state.device_types()
        self._tape_guard, self._row_guard = guard_for("the step tape"), guard_for("the step record")
        self._usage_guard, self._trace_guard = guard_for("the usage check"), guard_for("the op tracer")
        self.readback = Readback()
        self.optimizers = Optimizers(models, recorder.next_step, recorder.describe_parameters, self._row_guard)
        self.usage = UsageWatch(models, self._found, self.optimizers.step_of)
        self.live = LiveTrace(models, recorder, budgets[0], self._trace_guard)
        self._rows = StepRows(models, recorder, self.readback)
        self._buffers = BufferWatch(models)
        self._incidents = Incidents(
            models=models,
            recorder=recorder,
            readback=self.readback,
            live=self.live,
            budgets=budgets,
            guard_for=guard_for,
            terminal=terminal,
        )
        self._tape = StepTape(models, self.usage, self._tape_guard, self.live.pause)
        self._attempt: StepAttempt | None = None
        self._undecided: _Undecided | None = None
        self._with_closure: Optimizer | None = None  # an optimizer that runs forward and backward by itself
        self._count = 0  # step attempts of this process
        self._open = False
        self._busy = False  # inside backward or an optimizer: calls belong to those
        self._began = time.perf_counter()
        self.observing = 0.0  #: seconds AMPscope took within the present step
        self._losses: list[Tensor] = []
        self._parcels: list[Parcel] = []  # the losses, on their way to the host
        self._scaled_losses: list[Tensor] = []
        self._norms: dict[int, Tensor | None] = {}  # of unscaled gradients, by id of the optimizer
        self._micro_batches = 0
        self._stepped_in_epoch = -1  # autocast region in which the last optimizer step ran
        self._has_scaler = False

    # -- forward ------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Entry | None:
        """An outermost call of a watched module begins; see `modules.Caller`."""
        entry: Entry | None = None
        self.live.sweep()
        if not self._busy and (torch.is_grad_enabled() or self._open):
            with _Own(self, self._tape_guard):
                entry = self._before_forward(module, args, kwargs)
        return entry

    def leave(self, entry: Entry | None, result: Any) -> None:
        """The call has returned."""
        if entry is not None:
            with _Own(self, self._tape_guard):
                self._tape.leave(entry, result)
                self._tape.listen()

    def lost(self, entry: Entry | None) -> None:
        """The call was left by an exception: it is not part of the step, and neither is what is traced."""
        if entry is not None:
            self.live.drop()
            with self._tape_guard:
                self._open = self._tape.lost(entry)
                if self._open:
                    self._tape.listen()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Entry | None:
        if not self._open:
            self._begin()
        self._tape.stop()
        if self._tape.broken:
            return None
        learning = self._count < LEARNED_STEPS
        entry = self._tape.enter(module, args, kwargs, learning=learning, micro_batches=self._micro_batches)
        self.live.enter_call(args, kwargs)
        return entry

    def _begin(self) -> None:
        """The first watched forward of a step."""
        self.readback.poll()
        self._recorder.catch_up()
        self._decide(wait=False)
        if self._count < LEARNED_STEPS and self._models.refresh():
            self._recorder.describe_parameters()
        with self._usage_guard:
            self._check_region()
            self.usage.new_iteration()
        turns = max(len(self.optimizers), 2 if self._count < FIRST_TURNS else 1)
        self._tape.begin(turns=turns, anew=self._undecided is not None)  # an undecided step keeps its own tape
        self._open = True
        self._losses, self._parcels, self._scaled_losses = [], [], []
        self._norms, self._micro_batches = {}, 0
        self._began, self.observing = time.perf_counter(), 0.0
        if self._count == 0:
            self._buffers.start()
        self.live.start(self._count)

    def _check_region(self) -> None:
        """One autocast region around an optimizer step: weights cast before it would be used after it."""
        now = call_state.current(self._types)
        if now.cache and now.autocast_dtype is not None and self._stepped_in_epoch == process_hooks.autocast_epoch():
            step = max(self.optimizers.step_of(None) - 1, 0)
            self._found(Cause.MISUSE_AUTOCAST_SPANS_STEP, user_place(), {}, step)

    def part_failed(self) -> None:
        """A guard has caught a fault: what the faulty part had installed goes."""
        if self._tape_guard.broken:
            self.abandon()
        if self.live.broken:
            self.live.drop()

    def abandon(self, reason: str = "") -> None:
        """Gives up the step in progress: nothing stays installed, and an incident in it cannot be replayed."""
        self.live.drop()
        self._tape.abandon(reason)

    # -- loss and backward --------------------------------------------------------------------------------------

    def scaled(self, outputs: Any) -> None:
        """``scaler.scale`` was called on a loss."""
        with _Own(self, self._tape_guard):
            if not self._open and torch.is_grad_enabled():
                self._begin()  # the forward ran without gradients, inside a reentrant checkpoint
            self._has_scaler = True
            self._scaled_losses += [tensor.detach() for tensor in tensor_tree.tensors(outputs)]

    def has_scaled(self, results: Any) -> None:
        """``scaler.scale`` has returned: what made its results are multiplications with the loss scale."""
        with self._tape_guard:
            self._tape.scaled(list(tensor_tree.tensors(results)))

    def pause(self, *, paused: bool) -> None:
        """Leaves out what AMPscope itself computes."""
        self.live.pause(paused)
        self._tape.pause(paused=paused)

    @property
    def in_progress(self) -> bool:
        """Whether a watched forward has begun a step that no optimizer has ended."""
        return self._open

    def backward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a backward of the step; see `hub.Listener`."""
        if self._busy:
            return call(*args, **kwargs)
        if not self._open:
            return self._foreign_backward(call, args, kwargs)
        listening = self._tape.stop()
        with _Own(self, self._usage_guard):
            region = call_state.current(self._types).autocast_dtype
            several = len(self.optimizers) > 1 or self._count < LEARNED_STEPS
            roots = backward_roots(args, kwargs)
            self.usage.before_backward(roots, under_autocast=region is not None, several=several)
        with _Own(self, self._tape_guard):
            self._note_backward(args, kwargs)
        self._busy = True
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self.abandon("a part of the step was lost to an exception in backward")
            raise
        finally:
            self._busy = False
        self._after_backward(listening)
        return result

    def _foreign_backward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A backward of no step of ours; a watched module that it recomputes does not begin one."""
        self._busy = True
        try:
            return call(*args, **kwargs)
        finally:
            self._busy = False

    def _note_backward(self, args: Any, kwargs: Any) -> None:
        self._tape.backward(args, kwargs, first=not self._micro_batches)
        self.live.enter_backward(creates_graph=creates_graph(args, kwargs))
        losses = self._scaled_losses or [loss.detach() for loss in backward_roots(args, kwargs)]
        self._scaled_losses = []
        self._losses += losses
        self._parcels += [Parcel({"loss": loss}) for loss in losses if loss.numel() == 1]

    def _after_backward(self, listening: bool) -> None:
        self._micro_batches += 1
        self.live.next_micro_batch()
        with _Own(self, self._usage_guard):
            self.usage.after_backward()
        self._tape.after_backward()
        if listening:
            self._tape.listen()

    # -- the optimizer ------------------------------------------------------------------------------------------

    def end_tape(self) -> None:
        """The gradients are complete: nothing that follows in this step is ever replayed."""
        self._tape.stop()
        self.live.sweep()
        self.live.before_optimizer()

    def unscaled(self, optimizer: Optimizer) -> None:
        """``unscale_`` has divided the gradients of ``optimizer``."""
        with _Own(self, self._row_guard):
            self._norms[id(optimizer)] = gradients.total_norm(optimizer)

    def attempt(self, optimizer: Optimizer, scaling: ScaleState, proceed: Callable[[], Any]) -> tuple[Any, bool]:
        """Runs ``scaler.step(optimizer)``.

        Returns:
            What it returned, and whether the optimizer was skipped, as told by the optimizer's own hook: the scaler
            has waited for ``found_inf`` already. (A fused optimizer decides on the device; it is judged later.)
        """
        if not self.optimizers.owns(optimizer):
            return proceed(), False
        self.end_tape()
        attempt = self._attempt = self._new_attempt(optimizer, scaling)
        with _Own(self, self._row_guard):
            self._decide(wait=True)
            self._measure_scaled(attempt)
        try:
            result = proceed()
        finally:
            self._attempt = None
            self._busy = False
        with _Own(self, self._row_guard):
            if attempt.on_device:
                self._postpone(attempt)
            elif not attempt.stepped:
                self._skipped(attempt)
        self._finish(attempt)
        return result, not attempt.stepped

    def _measure_scaled(self, attempt: StepAttempt) -> None:
        """Looks at the gradients before a fused optimizer unscales them where they are."""
        if attempt.on_device and attempt.scaling is not None:
            norm, scale = self._norms.get(id(attempt.optimizer)), attempt.scaling.scale
            if norm is None:
                norm = gradients.total_norm(attempt.optimizer)
                norm = norm / scale if norm is not None and scale is not None else norm
            attempt.norm = norm
            attempt.norms = gradients.norms_by_name(attempt.optimizer, self._models)

    def _new_attempt(self, optimizer: Optimizer, scaling: ScaleState | None) -> StepAttempt:
        with _Own(self, self._row_guard):
            self._buffers.send()
        index, step = self.optimizers.index_of(optimizer), self.optimizers.step_of(optimizer)
        attempt = StepAttempt(optimizer, index, step, scaling, self._losses, micro_batches=self._micro_batches)
        attempt.norm = self._norms.get(id(optimizer))
        return attempt

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: with finite gradients, or without a scaler to judge them."""
        if self._busy or not self.optimizers.owns(optimizer):
            return
        if self._attempt is None and not self._open:
            self._with_closure = optimizer  # forward and backward come while it steps, or there are none
            with _Own(self, self._usage_guard):
                self.usage.bypassed_late(optimizer)
            return
        if self._attempt is None:
            self.end_tape()
            self._attempt = self._new_attempt(optimizer, None)
            with _Own(self, self._row_guard):
                self._check_bare_step(self._attempt)
        attempt = self._attempt
        if attempt.optimizer is optimizer:
            attempt.stepped = self._busy = True
            with _Own(self, self._row_guard):
                self._look_before_stepping(attempt)

    def _look_before_stepping(self, attempt: StepAttempt) -> None:
        """What the gradients do not tell, while the weights are still those that the step ran with."""
        poisoned = self._buffers.turned_bad()
        if not attempt.bad and attempt.loss_known_bad(self._parcels):
            self._judge(attempt, Trigger.NONFINITE_LOSS, Symptom(loss=True))
        elif poisoned and not attempt.bad:
            self._judge(attempt, Trigger.NONFINITE_BUFFER, Symptom())
        if self._rows.due(attempt):
            attempt.kept = lost_updates.keep(attempt.optimizer, self._models)

    def _after_closure(self, optimizer: Optimizer) -> None:
        """``optimizer.step(closure)`` ran its own forward and backward; they are judged after the fact."""
        self._with_closure = None
        if self._open:
            self.end_tape()
            attempt = self._attempt = self._new_attempt(optimizer, None)
            attempt.stepped = True
            with _Own(self, self._row_guard):
                self._check_bare_step(attempt)
                if not attempt.bad and attempt.loss_known_bad(self._parcels):
                    self._judge(attempt, Trigger.NONFINITE_LOSS, Symptom(loss=True))

    def _check_bare_step(self, attempt: StepAttempt) -> None:
        """``optimizer.step()`` without a scaler (or past it): the one check of the gradients is ours."""
        half = self._tape.half_forward
        self.usage.bypassed(attempt.optimizer, half_forward=half, has_scaler=self._has_scaler)
        attempt.norm = gradients.total_norm(attempt.optimizer)
        if attempt.norm is not None and not bool(attempt.norm.isfinite()):
            names = gradients.non_finite(attempt.optimizer, self._models)
            if names:
                self._judge(
                    attempt, Trigger.NONFINITE_GRADIENT, Symptom(frozenset(names), judged=self._judged(attempt))
                )

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if self._with_closure is optimizer:
            self._after_closure(optimizer)
        attempt = self._attempt
        if attempt is None or attempt.optimizer is not optimizer:
            return
        self._busy = False
        with _Own(self, self._row_guard):
            poisoned = [] if attempt.bad else self.live.poisoned_weights()
            if poisoned:
                reason = "an optimizer step is traced as it runs, never replayed"
                outcome = Outcome(ReplayStatus.UNAVAILABLE, reason)
                self._incidents.report(attempt, Trigger.NONFINITE_WEIGHT, outcome, Evidence(bad_params=tuple(poisoned)))
        if attempt.scaling is None:
            self._attempt = None
            self._finish(attempt)

    # -- verdicts -----------------------------------------------------------------------------------------------

    def _judge(self, attempt: StepAttempt, trigger: Trigger, symptom: Symptom) -> None:
        recording = None if self._tape.broken else self._tape.recording()
        busy, self._busy = self._busy, True
        self._incidents.judge(attempt, trigger, symptom, recording)
        self._busy = busy

    def _judged(self, attempt: StepAttempt) -> frozenset[str]:
        return frozenset(name for name, _ in gradients.owned(attempt.optimizer, self._models))

    def _skipped(self, attempt: StepAttempt) -> None:
        self._buffers.turned_bad()
        names = gradients.non_finite(attempt.optimizer, self._models)
        symptom = Symptom(frozenset(names), attempt.loss_known_bad(self._parcels), self._judged(attempt))
        self._judge(attempt, Trigger.NONFINITE_LOSS if symptom.loss else Trigger.NONFINITE_GRADIENT, symptom)

    def _postpone(self, attempt: StepAttempt) -> None:
        """A fused optimizer has decided on the device; its weights stay as they were until the next attempt."""
        attempt.found_inf = scaler_found_inf(attempt.scaling.scaler, attempt.optimizer) if attempt.scaling else []
        decision = Parcel({str(index): flag for index, flag in enumerate(attempt.found_inf)})
        self._undecided = _Undecided(attempt, decision, self._tape.recording())

    def _decide(self, *, wait: bool) -> None:
        """Judges the step whose optimizer decided on the device, once the decision is here."""
        pending = self._undecided
        if pending is None or not (wait or pending.decision.arrived):
            return
        self._undecided = None
        if any(pending.decision.values().values()):
            attempt = pending.attempt
            for entry in pending.recording.tape.entries:
                entry.versions = []  # counters moved although the device wrote nothing
            bad = frozenset(name for name, norm in attempt.norms.items() if not bool(norm.isfinite()))
            symptom = Symptom(bad, judged=frozenset(attempt.norms))
            busy, self._busy = self._busy, True
            self._incidents.judge(attempt, Trigger.NONFINITE_GRADIENT, symptom, pending.recording)
            self._busy = busy

    # -- the end of a step --------------------------------------------------------------------------------------

    def _finish(self, attempt: StepAttempt) -> None:
        seconds = time.perf_counter() - self._began
        attempt.norm = self._norms.get(id(attempt.optimizer)) if attempt.norm is None else attempt.norm
        with _Own(self, self._trace_guard):
            self._settle_trace(attempt)
        with _Own(self, self._row_guard):
            self._rows.write(attempt, seconds=seconds, observing=self.observing)
        with self._usage_guard:
            self.usage.stepped(attempt.optimizer, skipped=attempt.scaling is not None and not attempt.stepped)
        with self._trace_guard:
            self._incidents.passed(attempt)
            traced = self.live.began or bool(attempt.traced)
            self._budget.took(self._count, seconds - attempt.judging_s, traced=traced)
        self.optimizers.stepped(attempt.index, attempt.step)
        with self._usage_guard:
            within = call_state.current(self._types).autocast_dtype is not None
            self._stepped_in_epoch = process_hooks.autocast_epoch() if within else -1
        self._count += 1
        self._open = False

    def _settle_trace(self, attempt: StepAttempt) -> None:
        if attempt.bad:
            self.live.drop()
        elif self.live.active:
            absorbed = self.live.settle(attempt, self._count)
            if absorbed:
                outcome = Outcome(ReplayStatus.UNAVAILABLE, "seen as it happened, in the trace of the real step")
                self._incidents.report(attempt, Trigger.ABSORBED_OVERFLOW, outcome, Evidence(details={"ops": absorbed}))
        elif self._budget.wants(self._count) and self._budget.keeps(self._count) and self._models.compiled:
            self._busy = True
            self._incidents.trace_by_replay(attempt, self._tape.recording())
            self._busy = False
            self._budget.kept()

    def _found(
        self,
        cause: Cause,
        place: Place | None,
        evidence: dict[str, Any],
        step: int | None = None,
        form: MistakeForm | None = None,
    ) -> None:
        step, where = self.optimizers.step_of(None) if step is None else step, place or NOWHERE
        self._recorder.finding(cause, step, where, form=form, evidence=evidence)
        self._terminal.mistake(cause, step, where, evidence)

    def before_unscale(self, scaler: int, optimizer: Optimizer, *, by_loop: bool) -> None:
        """The scaler with a number is about to unscale the gradients of ``optimizer``, asked by the loop or not."""
        self.end_tape()
        with _Own(self, self._usage_guard):
            self.usage.before_unscale(scaler, optimizer, by_loop=by_loop)

    def scheduled(self, scheduler: Any) -> None:
        """A learning rate scheduler steps."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None and self.optimizers.owns(optimizer):
            with self._usage_guard:
                self.usage.scheduled(scheduler)

    def before_scaler_step(self, scaler: int, optimizer: Optimizer) -> None:
        """``step`` of the scaler with a number begins."""
        self.end_tape()
        with _Own(self, self._usage_guard):
            self.usage.before_step(scaler, optimizer, on_device=steps_on_device(optimizer))

    def close(self) -> None:
        """Ends for good; judges and writes what is still open."""
        with self._row_guard:
            self._decide(wait=True)
            self.readback.drain()
        self.abandon()
        self.live.sweep()
