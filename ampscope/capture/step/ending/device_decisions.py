"""Steps whose optimizer decides on the device whether to skip: judged once the decision has reached the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.ending import verdict
from ampscope.capture.step.ending.verdict import Verdict
from ampscope.capture.step.measures import gradients
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import scaler_found_inf

Judge = Callable[[StepAttempt, Verdict, TapedStep], None]


class _Undecided(NamedTuple):
    """An attempt with what its replay needs, until the decision arrives."""

    attempt: StepAttempt
    decision: Parcel
    recording: TapedStep
    hidden: Callable[[], Verdict | None]  #: what its gradients hide, when the decision is here


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

    def postpone(self, attempt: StepAttempt, recording: TapedStep, hidden: Callable[[], Verdict | None]) -> None:
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
            self._judge(pending.attempt, verdict.of_device_skip(pending.attempt.norms), pending.recording)
        elif hidden is not None:
            self._judge(pending.attempt, hidden, pending.recording._replace(moved=True))
