"""Notices autocast regions without effect: torch has switched them off, or they are for another kind of device."""

from __future__ import annotations

from dataclasses import replace

from ampscope.capture.events import EndedStep, JoinedScaler, RunEnd, StepObserver, StepStart
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.user_line import user_place
from ampscope.capture.usage.mistake import Mistake, ReportMistake
from ampscope.trace.evidence import FindingEvidence
from ampscope.trace.vocabulary import Cause, MistakeForm

#: Steps after which it is told; a run that ends before is told of at its end.
_ENOUGH = 8


class AmpEffect(StepObserver):
    """Looks whether some step begins in an autocast region that is on where the model is."""

    def __init__(self, models: Models, report: ReportMistake, guard: Guard) -> None:
        self.guard = guard
        self._models = models
        self._report = report
        self._seen: Mistake | None = None
        self._steps = 0
        self._is_over = False  # there is an effect, or it is told that there is none
        self._scaler_is_off = False

    def region_switched_off(self, device: str) -> None:
        """Torch has switched off a region that the loop asked for."""
        self._note(MistakeForm.AUTOCAST_SWITCHED_OFF, device)

    def step_began(self, start: StepStart) -> None:
        """Looks at the region around the first forward."""
        if self._is_over:
            return
        on = [each for each in start.ambient.regions if each.enabled]
        here = {device.type for device in self._models.devices} if on else set()
        if any(each.device_type in here for each in on):
            self._is_over = True
        elif on and here:
            self._note(MistakeForm.AUTOCAST_ELSEWHERE, on[0].device_type)

    def _note(self, form: MistakeForm, device: str) -> None:
        if not self._is_over and self._seen is None:
            self._seen = Mistake(Cause.AMP_WITHOUT_EFFECT, user_place(), 0, form, FindingEvidence(device=device))

    def scaler_joined(self, joined: JoinedScaler) -> None:
        """Takes down whether the scaler does anything."""
        enabled = getattr(joined.scaler, "is_enabled", None)
        self._scaler_is_off = callable(enabled) and not enabled()

    def step_ended(self, _: EndedStep) -> None:
        """Tells of it after some steps."""
        self._steps += 1
        if self._steps == _ENOUGH:
            self._tell()

    def run_ended(self, _: RunEnd) -> None:
        """Tells of it where the run was too short before."""
        if self._steps:
            self._tell()

    def _tell(self) -> None:
        if self._seen is not None and not self._is_over:
            self._is_over = True
            tensors = ", ".join(sorted({device.type for device in self._models.devices}))
            evidence = replace(self._seen.evidence, tensors=tensors, scaler_is_off=self._scaler_is_off)
            self._report(self._seen._replace(evidence=evidence))
