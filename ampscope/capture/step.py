"""Follows one optimizer step after another: keeps its tape, traces some, and replays the bad ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope import provenance
from ampscope.capture import ambient, containers, gradients, hub, replay, torch_private
from ampscope.capture.budget import ReplayBudget, TraceBudget
from ampscope.capture.frames import NOWHERE, user_place
from ampscope.capture.guard import Guard
from ampscope.capture.models import Models
from ampscope.capture.readback import Readback, Values
from ampscope.capture.recorder import Recorder
from ampscope.capture.replay import Outcome, Symptom
from ampscope.capture.standin import BufferKeeper
from ampscope.capture.tape import Entry, Tape
from ampscope.capture.taping import TapeMode
from ampscope.capture.tracer import Tracer
from ampscope.capture.usage import UsageWatch
from ampscope.trace.schema import Node, Phase, ReplayStatus, Source, StepRow, Trigger
from ampscope.trace.vocabulary import Cause


@dataclass(slots=True)
class ScaleState:
    """A scaler's tensors when a step was attempted."""

    scaler: Any
    scale: Tensor | None
    tracker: Tensor | None


@dataclass(slots=True)
class StepAttempt:
    """One optimizer's attempt at a step."""

    optimizer: Optimizer
    index: int
    step: int
    scaling: ScaleState | None
    stepped: bool = False
    bad: bool = False
    norm: Tensor | None = None
    divisor: Tensor | float = 1.0
    losses: list[Tensor] = field(default_factory=list)


class _Own:
    """A stretch of AMPscope's own work: guarded, timed, and not traced as if it were the user's."""

    __slots__ = ("_guard", "_started", "_steps")

    def __init__(self, steps: StepWatch, guard: Guard) -> None:
        self._steps = steps
        self._guard = guard
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._steps.pause(True)

    def __exit__(self, *error: Any) -> bool:
        caught = self._guard.__exit__(*error)
        self._steps.pause(False)
        self._steps.observing += time.perf_counter() - self._started
        return caught


class StepWatch:
    """The state of the step in progress.

    Args:
        models: The watched models.
        recorder: Where rows go.
        guard_for: Makes the guard of a part; its fault removes what the part installed.
        budgets: Which steps are traced, which incidents replayed.
        say: Tells the user one line.
    """

    def __init__(
        self,
        models: Models,
        recorder: Recorder,
        guard_for: Callable[[str], Guard],
        budgets: tuple[TraceBudget, ReplayBudget],
        say: Callable[[str], None],
    ) -> None:
        self.readback = Readback()
        self._models = models
        self._recorder = recorder
        self._trace_budget, self._replay_budget = budgets
        self._say = say
        self._types = ambient.device_types()
        self._tape_guard, self._trace_guard = guard_for("the step tape"), guard_for("the op tracer")
        self._replay_guard, self._row_guard = guard_for("the replay"), guard_for("the step record")
        self._usage_guard = guard_for("the usage check")
        self.usage = UsageWatch(models, self._found)
        self._tape = Tape(self._types)
        self._mode = TapeMode(self._tape, self.usage, self._tape_guard)
        self._buffers = BufferKeeper(models)
        self._tracer: Tracer | None = None
        self._owned: dict[int, bool] = {}
        self._indices: dict[int, int] = {}
        self._next_step = dict(recorder.next_step)
        self._attempt: StepAttempt | None = None
        self._pending_fused: list[tuple[StepAttempt, list[Tensor]]] = []
        self._stepped: list[int] = []  # optimizers that stepped since the tape was cleared
        self._since = 0  # where on the tape the present step begins
        self._count = 0  # step attempts of this process
        self._open = False
        self._busy = False  # inside backward, an optimizer or a replay: calls belong to those
        self._began = time.perf_counter()
        self.observing = 0.0  #: seconds AMPscope took within the present step
        self._losses: list[Tensor] = []
        self._scaled_losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._micro_batches = 0
        self._half_forward = False
        self._has_scaler = False
        self._bad_in_a_row = 0

    # -- forward ------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An outermost call of a watched module."""
        if self._busy or not (torch.is_grad_enabled() or self._open):
            return forward(*args, **kwargs)
        entry: Entry | None = None
        with _Own(self, self._tape_guard):
            entry = self._before_forward(module, args, kwargs)
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            self.abandon()
            raise
        with _Own(self, self._tape_guard):
            if entry is not None:
                self._tape.returned(entry, result)
            self._mode.insert()
        return result

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Entry | None:
        if not self._open:
            self._begin()
        self._mode.remove()
        if self._tape_guard.broken:
            return None
        entry = self._tape.module_call(module, args, kwargs, user_place() or NOWHERE)
        entry.versions = replay.parameter_versions(self._models)
        self._half_forward |= entry.ambient.autocast_dtype is torch.float16
        if self._tracer is not None:
            for name, tensor in replay.named_inputs(args, kwargs):
                self._tracer.name_entry(tensor, Node.INPUT, name)
        return entry

    def _begin(self) -> None:
        """The first watched forward of a step."""
        self.readback.poll()
        self._judge_fused()
        last = self._stepped[-1:] if self._stepped else []
        if len(set(self._stepped)) >= len(self._indices) or last == self._stepped[-2:-1]:
            self._tape.clear()
            self._stepped.clear()
        self._since = len(self._tape)
        self._open = True
        self._mode.after_backward = False
        self._losses, self._scaled_losses, self._norm, self._micro_batches = [], [], None, 0
        self._began, self.observing = time.perf_counter(), 0.0
        self._buffers.take()
        if self._trace_budget.wants(self._count) and not self._models.compiled:
            self._start_tracer()

    def _start_tracer(self) -> None:
        with self._trace_guard:
            self._tracer = Tracer(self._recorder.sites, self._models.names, full=False, guard=self._trace_guard)
            for name, parameter in self._models.parameters.values():
                self._tracer.name_entry(parameter, Node.PARAMETER, name)
            for module, _, name, buffer in self._models.buffers():
                self._tracer.name_entry(buffer, Node.BUFFER, ".".join(filter(None, (module, name))))
            self._tracer.insert()

    def abandon(self) -> None:
        """The loop left the step with an exception, or a part of ours failed: nothing stays installed."""
        self._mode.remove()
        if self._tracer is not None:
            self._tracer.remove()
            self._tracer = None
        self._tape.clear()
        self._since = 0
        self._open = False

    # -- loss and backward --------------------------------------------------------------------------------------

    def scaled(self, outputs: Any) -> None:
        """``scaler.scale`` was called on a loss."""
        self._has_scaler = True
        self._scaled_losses += [tensor.detach() for tensor in containers.tensors(outputs)]

    @property
    def in_progress(self) -> bool:
        """Whether a watched forward has begun a step that no optimizer has ended."""
        return self._open

    def backward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a backward of the step; see `hub.Listener`."""
        if self._busy or not self._open:
            return call(*args, **kwargs)
        listening = self._mode.remove()
        with _Own(self, self._usage_guard):
            region = ambient.current(self._types).autocast_dtype
            self.usage.before_backward(under_autocast=region is not None, scaled=bool(self._scaled_losses))
        with _Own(self, self._tape_guard):
            self._tape.backward_call(hub.original_backward(), args, kwargs)
            self._losses += self._scaled_losses or [loss.detach() for loss in containers.tensors(args[0])]
            self._scaled_losses = []
        self._busy = True
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self.abandon()
            raise
        finally:
            self._busy = False
        self._after_backward(listening)
        return result

    def _after_backward(self, listening: bool) -> None:
        self._micro_batches += 1
        if self._tracer is not None:
            self._tracer.micro_batch += 1
        with _Own(self, self._usage_guard):
            self.usage.after_backward()
        self._mode.after_backward = True
        if listening:
            self._mode.insert()

    def pause(self, paused: bool) -> None:
        """Stops or resumes tracing, while AMPscope itself computes."""
        if self._tracer is not None:
            self._tracer.paused = paused

    # -- the optimizer ------------------------------------------------------------------------------------------

    def unscaled(self, optimizer: Optimizer) -> None:
        """``unscale_`` has divided the gradients of ``optimizer``."""
        with _Own(self, self._row_guard):
            self._norm = gradients.total_norm(optimizer)

    def end_tape(self) -> None:
        """Nothing that follows in this step is ever replayed."""
        self._mode.remove()
        if self._tracer is not None and not self._half_parameters():
            self._tracer.remove()

    def _half_parameters(self) -> bool:
        return any(p.dtype in (torch.float16, torch.bfloat16) for _, p in self._models.parameters.values())

    def attempt(
        self, optimizer: Optimizer, scaling: ScaleState, proceed: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """Runs ``scaler.step(optimizer)``.

        Returns:
            What it returned, and whether the optimizer was skipped, as told by the optimizer's own hook: the scaler
            has waited for ``found_inf`` already. (A fused optimizer decides on the device; it is judged later.)
        """
        self.end_tape()
        attempt = self._attempt = self._new_attempt(optimizer, scaling)
        try:
            result = proceed()
        finally:
            self._attempt = None
        with _Own(self, self._row_guard):
            if torch_private.steps_on_device(optimizer):
                attempt.divisor = scaling.scale if scaling.scale is not None else 1.0
                attempt.norm = gradients.total_norm(optimizer) if self._norm is None else self._norm
                found = torch_private.scaler_found_inf(scaling.scaler, optimizer)
                self._pending_fused.append((attempt, found))
            elif not attempt.stepped:
                self._skipped(attempt)
        self._finish(attempt)
        return result, not attempt.stepped

    def _new_attempt(self, optimizer: Optimizer, scaling: ScaleState | None) -> StepAttempt:
        index = self._indices.setdefault(id(optimizer), len(self._indices))
        step = self._next_step.get(index, 0)
        return StepAttempt(optimizer, index, step, scaling, norm=self._norm, losses=self._losses)

    def step_of(self, optimizer: Optimizer | None) -> int:
        """Number of the step that ``optimizer`` (or, with None, the first) is working on."""
        index = self._indices.get(id(optimizer), 0)
        return self._next_step.get(index, 0)

    def index_of(self, optimizer: Optimizer) -> int:
        """Number of an optimizer."""
        return self._indices.setdefault(id(optimizer), len(self._indices))

    def _owns(self, optimizer: Optimizer) -> bool:
        key = id(optimizer)
        if key not in self._owned:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._owned[key] = self._models.owns(parameters)
        return self._owned[key]

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: with finite gradients, or without a scaler to judge them."""
        if self._busy or not self._owns(optimizer):
            return
        with _Own(self, self._row_guard):
            if self._attempt is None:
                self._bare_step(optimizer)
            attempt = self._attempt
            if attempt is not None and attempt.optimizer is optimizer:
                attempt.stepped = True
                if not attempt.bad and self._loss_is_bad(attempt):
                    self._incident(attempt, Trigger.NONFINITE_LOSS, Symptom(loss=True))
        self._busy = True
        if self._tracer is not None:
            self._tracer.phase = Phase.OPTIMIZER

    def _bare_step(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` without a scaler (or past it): the one check of the gradients is ours."""
        self.end_tape()
        with self._usage_guard:
            self.usage.bypassed(optimizer, half_forward=self._half_forward, has_scaler=self._has_scaler)
        self._norm = gradients.total_norm(optimizer)
        attempt = self._attempt = self._new_attempt(optimizer, None)
        if self._norm is not None and not bool(self._norm.isfinite()):
            names = gradients.non_finite(optimizer, self._models)
            if names:
                self._incident(attempt, Trigger.NONFINITE_GRADIENT, Symptom(frozenset(names)))

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        attempt = self._attempt
        if not self._owns(optimizer) or attempt is None or attempt.optimizer is not optimizer:
            return
        self._busy = False
        with _Own(self, self._trace_guard):
            self._check_weights(attempt)
        if attempt.scaling is None:
            self._attempt = None
            self._finish(attempt)

    def _check_weights(self, attempt: StepAttempt) -> None:
        """In a traced step of a half-precision model: did the optimizer itself make a parameter non-finite?"""
        if self._tracer is None or not self._half_parameters() or attempt.bad:
            return
        self._tracer.remove()
        bad = [(name, p) for name, p in self._models.parameters.values() if not replay.finite(p)]
        for name, parameter in bad:
            self._tracer.sink(parameter.detach(), Node.WEIGHT_AFTER, name, "")
        if bad:
            reason = "the optimizer step itself is traced as it runs, never replayed"
            outcome = Outcome(ReplayStatus.UNAVAILABLE, reason)
            self._report(attempt, Trigger.NONFINITE_WEIGHT, outcome, {"params": [name for name, _ in bad]})

    # -- verdicts -----------------------------------------------------------------------------------------------

    def _loss_is_bad(self, attempt: StepAttempt) -> bool:
        """Whether a loss is non-finite, as far as the host knows it without waiting."""
        return any(not bool(loss.isfinite().all()) for loss in attempt.losses if loss.device.type == "cpu")

    def _skipped(self, attempt: StepAttempt) -> None:
        names = gradients.non_finite(attempt.optimizer, self._models)
        symptom = Symptom(frozenset(names), self._loss_is_bad(attempt))
        trigger = Trigger.NONFINITE_LOSS if symptom.loss else Trigger.NONFINITE_GRADIENT
        self._incident(attempt, trigger, symptom)

    def _judge_fused(self) -> None:
        """Steps of fused optimizers are judged at the next forward: the device has decided by then."""
        for attempt, found in self._pending_fused:
            if any(bool(flag) for flag in found):
                names = gradients.non_finite(attempt.optimizer, self._models)
                self._incident(attempt, Trigger.NONFINITE_GRADIENT, Symptom(frozenset(names)))
        self._pending_fused.clear()

    def _incident(self, attempt: StepAttempt, trigger: Trigger, symptom: Symptom) -> None:
        attempt.bad = True
        outcome = Outcome(ReplayStatus.UNAVAILABLE, "replays had used up their share of the run's time")
        if self._tape_guard.broken or self._replay_guard.broken:
            outcome.reason = "the step tape or the replay had switched itself off"
        elif self._replay_budget.allows():
            outcome = Outcome(ReplayStatus.UNAVAILABLE, "the replay failed; see the run's events")
            with self._replay_guard:
                outcome = self._replay(attempt.step, symptom, Source.REPLAY)
        if outcome.status not in (ReplayStatus.EXACT, ReplayStatus.DIVERGED):
            self._trace_budget.arm()
        self._report(attempt, trigger, outcome, {"params": sorted(symptom.gradients)})

    def _replay(self, step: int, symptom: Symptom, source: str) -> Outcome:
        tracer = Tracer(
            self._recorder.sites,
            self._models.names,
            full=True,
            guard=self._replay_guard,
            stop=replay.call_user.__code__,
        )
        self._busy = True
        try:
            outcome = replay.run(self._tape, self._models, self._buffers, tracer, symptom, since=self._since)
        finally:
            self._busy = False
        self._replay_budget.spent(outcome.seconds)
        if outcome.status is not ReplayStatus.UNAVAILABLE:
            self._recorder.trace(tracer, step, source)
        return outcome

    def _report(self, attempt: StepAttempt, trigger: Trigger, outcome: Outcome, evidence: dict[str, Any]) -> None:
        attempt.bad = True
        if self._tracer is not None and outcome.status is not ReplayStatus.EXACT:
            self._trace_live(attempt)
        scale = attempt.scaling.scale if attempt.scaling is not None else None
        self.readback.fetch(
            {"loss": _mean(attempt.losses), "scale": scale},
            lambda values: self._recorder.incident(
                trigger,
                step=attempt.step,
                optimizer=attempt.index,
                loss=values["loss"],
                scale=values["scale"],
                outcome=outcome,
                evidence=evidence,
            ),
        )
        self._bad_in_a_row += 1
        if trigger is not Trigger.NONFINITE_GRADIENT or self._bad_in_a_row == 4:
            self._say(f"step {attempt.step}: {trigger.replace('_', ' ')}; replay {outcome.status.replace('_', ' ')}")

    def _trace_live(self, attempt: StepAttempt) -> None:
        """Writes the trace of the real step, with the walk's starting points marked."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        tracer.remove()
        for loss in attempt.losses:
            tracer.sink(loss, Node.LOSS, "loss")
        for name, gradient in gradients.owned(attempt.optimizer, self._models):
            if not replay.finite(gradient):
                tracer.sink(gradient, Node.GRADIENT, name, name.rpartition(".")[0])
        self._recorder.trace(tracer, attempt.step, Source.LIVE)

    # -- the end of a step --------------------------------------------------------------------------------------

    def _finish(self, attempt: StepAttempt) -> None:
        seconds = time.perf_counter() - self._began
        traced = Source.LIVE if self._tracer is not None else Source.REPLAY if attempt.bad else ""
        with self._trace_guard:
            self._settle_trace(attempt)
        with self._row_guard:
            self._emit(attempt, seconds, traced)
        with self._usage_guard:
            self.usage.stepped()
        self._bad_in_a_row = self._bad_in_a_row if attempt.bad else 0
        self._trace_budget.took(self._count, seconds, traced=traced == Source.LIVE)
        self._stepped.append(attempt.index)
        self._next_step[attempt.index] = attempt.step + 1
        self._count += 1
        self._open = False

    def _settle_trace(self, attempt: StepAttempt) -> None:
        """Writes or drops the trace of a healthy step."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            if self._models.compiled and self._trace_budget.wants(self._count) and not attempt.bad:
                self._trace_compiled(attempt)
            return
        tracer.remove()
        if attempt.bad:
            return
        keep = self._trace_budget.keeps(self._count)
        if not keep and tracer.all_finite():
            return
        ops, edges = tracer.rows(attempt.step, Source.LIVE)
        absorbed = provenance.absorbed(provenance.Graph(ops, edges, self._recorder.sites.row))
        if absorbed:
            outcome = Outcome(ReplayStatus.UNAVAILABLE, "seen as it happened, in the trace of the real step")
            self._recorder.trace(tracer, attempt.step, Source.LIVE)
            self._report(attempt, Trigger.ABSORBED_OVERFLOW, outcome, {"ops": [origin.seq for origin in absorbed]})
        elif keep:
            self._recorder.trace(tracer, attempt.step, Source.LIVE)
            self._trace_budget.kept()

    def _trace_compiled(self, attempt: StepAttempt) -> None:
        """A compiled step cannot be traced as it runs: its tape is replayed eagerly, on weights that moved on a step."""
        if self._trace_budget.keeps(self._count):
            self._replay(attempt.step, Symptom(), Source.REPLAY)
            self._trace_budget.kept()

    def _emit(self, attempt: StepAttempt, seconds: float, traced: str) -> None:
        norm = attempt.norm if attempt.norm is not None else self._norm
        scaling = attempt.scaling
        fetched: dict[str, Tensor | float | None] = {
            "loss": _mean(attempt.losses),
            "norm": norm,
            "divisor": attempt.divisor,
            "scale": scaling.scale if scaling else None,
            "tracker": scaling.tracker if scaling else None,
            "found_inf": self._pending_fused[-1][1][0] if self._is_pending(attempt) else None,
        }
        lr = attempt.optimizer.param_groups[0].get("lr")
        micro_batches, observing = self._micro_batches, self.observing
        ended = time.time()
        bad = attempt.bad or self._count % gradients.RECORD_EVERY == 0
        if bad and not torch_private.steps_on_device(attempt.optimizer):
            self._recorder.grads(
                gradients.rows(
                    attempt.optimizer,
                    self._models,
                    self._recorder.params,
                    step=attempt.step,
                    index=attempt.index,
                    divisor=1.0,
                )
            )

        def write(values: Values) -> None:
            found = values["found_inf"]
            skipped = bool(found) if found is not None else not attempt.stepped
            tracker, raw, divisor = values["tracker"], values["norm"], values["divisor"] or 1.0
            self._recorder.step(
                StepRow(
                    step=attempt.step,
                    optimizer=attempt.index,
                    segment=self._recorder.segment,
                    time=ended,
                    loss=values["loss"],
                    scale=values["scale"],
                    growth_tracker=int(tracker) if tracker is not None else None,
                    found_inf=skipped if scaling is not None else None,
                    skipped=skipped,
                    grad_norm=raw / divisor if raw is not None else None,
                    lr=float(lr) if lr is not None else None,
                    micro_batches=micro_batches,
                    duration_s=seconds,
                    observing_s=observing,
                    traced=traced,
                )
            )

        self.readback.fetch(fetched, write)
        self.readback.poll()

    def _is_pending(self, attempt: StepAttempt) -> bool:
        return bool(self._pending_fused) and self._pending_fused[-1][0] is attempt and bool(self._pending_fused[-1][1])

    def _found(self, cause: Cause, place: Any, evidence: dict[str, Any]) -> None:
        step = min(self._next_step.values(), default=0) if not self._indices else self.step_of(None)
        self._recorder.finding(cause, step, place, evidence)

    def close(self) -> None:
        """Ends for good; judges and writes what is still open."""
        with self._row_guard:
            self._judge_fused()
            self.readback.drain()
        self.abandon()


def _mean(losses: list[Tensor]) -> Tensor | None:
    """Mean of scalar losses as one device scalar."""
    if len(losses) == 1 and losses[0].dim() == 0:
        return losses[0]
    means = [loss.float().mean() for loss in losses if loss.numel()]
    return torch.stack([mean.to(means[0].device) for mean in means]).mean() if means else None
