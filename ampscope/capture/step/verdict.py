"""Says of an attempt whether it went bad: from gradients, losses, buffers and weights to what triggers an incident."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ampscope.capture.changes.replay_results import Symptom
from ampscope.capture.events import OpenStep, StepAttempt
from ampscope.capture.loop_state.held_state import HeldTensor
from ampscope.capture.step import gradients
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.failed_call import FailedCall
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import scaler_found_inf
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Phase, StateKind, Trigger


class StepVerdict(NamedTuple):
    """A step that went bad: what made it an incident, and what a replay has to show again."""

    trigger: Trigger
    symptom: Symptom
    evidence: Evidence = Evidence()


def of_skip(attempt: StepAttempt, models: Models) -> StepVerdict:
    """Judges a step that the scaler has skipped: some gradients were not finite, perhaps because the loss was not."""
    symptom = Symptom(
        frozenset(gradients.non_finite(attempt.optimizer, models)),
        attempt.opened.loss_known_bad,
        gradients.names(attempt.optimizer, models),
    )
    return StepVerdict(Trigger.NONFINITE_LOSS if symptom.loss else Trigger.NONFINITE_GRADIENT, symptom)


def of_unscaled_step(attempt: StepAttempt, models: Models) -> StepVerdict | None:
    """Judges a step without a scaler by the total norm of its gradients; waits for the device."""
    if attempt.norm is None or math.isfinite(attempt.opened.number(attempt.norm)):
        return None
    bad = gradients.non_finite(attempt.optimizer, models)
    if not bad:
        return None
    symptom = Symptom(frozenset(bad), judged=gradients.names(attempt.optimizer, models))
    return StepVerdict(Trigger.NONFINITE_GRADIENT, symptom)


def of_edits(attempt: StepAttempt, models: Models) -> StepVerdict | None:
    """Judges gradients that the loop changed after the scaler found them finite, as far as the host knows by now."""
    norm = attempt.opened.known_number(attempt.opened.edited.get(id(attempt.optimizer)))
    bad = gradients.non_finite(attempt.optimizer, models) if norm is not None and not math.isfinite(norm) else ()
    symptom = Symptom(frozenset(bad), judged=gradients.names(attempt.optimizer, models)) if bad else None
    return StepVerdict(Trigger.NONFINITE_GRADIENT, symptom) if symptom is not None else None


def of_device_skip(norms: Mapping[str, Tensor]) -> StepVerdict:
    """Judges a step that a fused optimizer skipped on the device, by its gradients' ``norms``: no more is left."""
    bad = frozenset(name for name, norm in norms.items() if not bool(norm.isfinite()))
    return StepVerdict(Trigger.NONFINITE_GRADIENT, Symptom(bad, judged=frozenset(norms)))


def of_what_gradients_hide(
    attempt: StepAttempt, poisoned: list[HeldTensor], of_carried: Trigger | None = None
) -> StepVerdict | None:
    """Judges the loss of a step and the state that it wrote, as far as the host knows without waiting.

    Args:
        attempt: The attempt.
        poisoned: State that was finite before.
        of_carried: What there is to say of the tensors that the loop carries.
    """
    of_loss = of_loss_alone(attempt.opened)
    if of_loss is not None:
        return of_loss
    if not poisoned:
        return StepVerdict(of_carried, Symptom()) if of_carried is not None else None
    buffers = frozenset(held.name for held in poisoned if held.kind is StateKind.BUFFER)
    return StepVerdict(Trigger.NONFINITE_BUFFER if buffers else Trigger.NONFINITE_STATE, Symptom(buffers=buffers))


def of_updates() -> StepVerdict:
    """Returns the verdict on updates that the loop itself is about to make: not finite, though the gradients are."""
    return StepVerdict(Trigger.NONFINITE_WEIGHT, Symptom())


def of_error(call: FailedCall) -> StepVerdict:
    """Returns the verdict on an error that ended the run, and speaks of values that are not finite and are there."""
    return StepVerdict(Trigger.EXCEPTION, Symptom(loss=True), Evidence(exception=replace(call, phase=Phase.FORWARD)))


def of_loss_alone(opened: OpenStep) -> StepVerdict | None:
    """Judges the loss of a step, as far as the host knows it without waiting."""
    return StepVerdict(Trigger.NONFINITE_LOSS, Symptom(loss=True)) if opened.loss_known_bad else None


Judge = Callable[[StepAttempt, StepVerdict, TapedStep], None]


class _Undecided(NamedTuple):
    """An attempt with what its replay needs, until the decision arrives."""

    attempt: StepAttempt
    decision: Parcel
    recording: TapedStep
    hidden: Callable[[], StepVerdict | None]  #: what its gradients hide, when the decision is here


class DeviceDecisions:
    """The latest attempt of a fused optimizer, whose weights stay as they were until the next one.

    Args:
        models: The watched models.
        judge: Called with an attempt that turns out to have been skipped.
    """

    def __init__(self, models: Models, judge: Judge) -> None:
        self._models = models
        self._judge = judge
        self._undecided: _Undecided | None = None

    @property
    def pending(self) -> bool:
        """Whether an attempt waits for its decision."""
        return self._undecided is not None

    def look_ahead(self, attempt: StepAttempt) -> None:
        """Looks at the gradients before the optimizer unscales them where they are."""
        if not attempt.on_device or attempt.scaling is None:
            return
        norm, scale = attempt.norm, attempt.scaling.scale
        if norm is None:
            norm = gradients.total_norm(attempt.optimizer)
            norm = norm / scale if norm is not None and scale is not None else norm
        attempt.norm = norm
        attempt.norms = gradients.norms_by_name(attempt.optimizer, self._models)

    def postpone(self, attempt: StepAttempt, recording: TapedStep, hidden: Callable[[], StepVerdict | None]) -> None:
        """The optimizer has stepped or skipped; `decide` will tell.

        Args:
            attempt: Its attempt.
            recording: What a replay needs.
            hidden: Judges loss and buffers, which were sent to the host before the decision.
        """
        attempt.found_inf = scaler_found_inf(attempt.scaling.scaler, attempt.handed) if attempt.scaling else []
        for entry in recording.tape.entries:  # counters move although a device that skips writes nothing
            entry.versions = self._models.versions(entry.module) if entry.versions else []
        decision = Parcel({str(index): flag for index, flag in enumerate(attempt.found_inf)})
        self._undecided = _Undecided(attempt, decision, recording._replace(late=True), hidden)

    def decide(self, *, wait: bool) -> None:
        """Judges the attempt, if its decision is here or worth waiting for."""
        pending = self._undecided
        if pending is None or not (wait or pending.decision.arrived):
            return
        self._undecided = None
        skipped, hidden = any(pending.decision.values().values()), pending.hidden()
        if pending.attempt.bad:
            return
        if skipped:
            self._judge(pending.attempt, of_device_skip(pending.attempt.norms), pending.recording)
        elif hidden is not None:
            self._judge(pending.attempt, hidden, pending.recording._replace(moved=True))
