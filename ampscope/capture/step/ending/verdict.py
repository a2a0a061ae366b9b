"""Says of an attempt whether it went bad: from gradients, losses, buffers and weights to what triggers an incident."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ampscope.capture.events.open_step import OpenStep, StepAttempt
from ampscope.capture.replay.results import Symptom
from ampscope.capture.step.measures import gradients
from ampscope.capture.step.measures.state.held import Held
from ampscope.capture.torch_support.calls.failed_call import FailedCall
from ampscope.capture.torch_support.models import Models
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import Phase, StateKind, Trigger


class Verdict(NamedTuple):
    """A step that went bad: what made it an incident, and what a replay has to show again."""

    trigger: Trigger
    symptom: Symptom
    evidence: Evidence = Evidence()


def of_skip(attempt: StepAttempt, models: Models) -> Verdict:
    """Judges a step that the scaler has skipped: some gradients were not finite, perhaps because the loss was not."""
    symptom = Symptom(
        frozenset(gradients.non_finite(attempt.optimizer, models)),
        attempt.opened.loss_known_bad,
        gradients.names(attempt.optimizer, models),
    )
    return Verdict(Trigger.NONFINITE_LOSS if symptom.loss else Trigger.NONFINITE_GRADIENT, symptom)


def of_unscaled_step(attempt: StepAttempt, models: Models) -> Verdict | None:
    """Judges a step without a scaler by the total norm of its gradients; waits for the device."""
    if attempt.norm is None or math.isfinite(attempt.opened.number(attempt.norm)):
        return None
    bad = gradients.non_finite(attempt.optimizer, models)
    if not bad:
        return None
    symptom = Symptom(frozenset(bad), judged=gradients.names(attempt.optimizer, models))
    return Verdict(Trigger.NONFINITE_GRADIENT, symptom)


def of_edits(attempt: StepAttempt, models: Models) -> Verdict | None:
    """Judges gradients that the loop changed after the scaler found them finite, as far as the host knows by now."""
    norm = attempt.opened.known_number(attempt.opened.edited.get(id(attempt.optimizer)))
    bad = gradients.non_finite(attempt.optimizer, models) if norm is not None and not math.isfinite(norm) else ()
    symptom = Symptom(frozenset(bad), judged=gradients.names(attempt.optimizer, models)) if bad else None
    return Verdict(Trigger.NONFINITE_GRADIENT, symptom) if symptom is not None else None


def of_device_skip(norms: Mapping[str, Tensor]) -> Verdict:
    """Judges a step that a fused optimizer skipped on the device, by its gradients' ``norms``: no more is left."""
    bad = frozenset(name for name, norm in norms.items() if not bool(norm.isfinite()))
    return Verdict(Trigger.NONFINITE_GRADIENT, Symptom(bad, judged=frozenset(norms)))


def of_what_gradients_hide(
    attempt: StepAttempt, poisoned: list[Held], of_carried: Trigger | None = None
) -> Verdict | None:
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
        return Verdict(of_carried, Symptom()) if of_carried is not None else None
    buffers = frozenset(held.name for held in poisoned if held.kind is StateKind.BUFFER)
    return Verdict(Trigger.NONFINITE_BUFFER if buffers else Trigger.NONFINITE_STATE, Symptom(buffers=buffers))


def of_updates() -> Verdict:
    """Returns the verdict on updates that the loop itself is about to make: not finite, though the gradients are."""
    return Verdict(Trigger.NONFINITE_WEIGHT, Symptom())


def of_error(call: FailedCall) -> Verdict:
    """Returns the verdict on an error that ended the run, and speaks of values that are not finite and are there."""
    return Verdict(Trigger.EXCEPTION, Symptom(loss=True), Evidence(exception=replace(call, phase=Phase.FORWARD)))


def of_loss_alone(opened: OpenStep) -> Verdict | None:
    """Judges the loss of a step, as far as the host knows it without waiting."""
    return Verdict(Trigger.NONFINITE_LOSS, Symptom(loss=True)) if opened.loss_known_bad else None
