"""Attempts at a step, from begin to end: what every way to end one does, whichever it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import BareStep, EndedStep, ScalerCall, ScaleState, StepAttempt, StepObserver
from ampscope.capture.heal.cured_step import Handed
from ampscope.capture.heal.healer import Healer
from ampscope.capture.loop_state.between_steps import CarriedState
from ampscope.capture.loop_state.held_state import HeldTensor, WrittenState, largest_within
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.step import gradients, verdict
from ampscope.capture.step.cycle import Moment, StepCycle
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.observers import Observers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.step.verdict import DeviceDecisions, StepVerdict
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, stand_in, tells_of_steps
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.torch_support.torch_private import scaler_found_inf
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.evidence import Evidence


class Attempts:
    """Begins, judges and ends one attempt after another.

    Args:
        models: The watched models.
        optimizers: Which optimizers are the run's, and their steps.
        cycle: Where the step is.
        observers: Are told.
        incidents: Takes the steps that went bad.
        tape: What a replay needs.
        written: Whether buffers that a step wrote are finite.
        carried: What the loop carries from step to step, and whether it is finite.
        own: Marks AMPscope's own work.
        guard: Catches faults of judging and recording.
        healer: Gives bad steps back what was proved on them; None where that was not asked for.
    """

    def __init__(
        self,
        models: Models,
        optimizers: OptimizerNumbers,
        cycle: StepCycle,
        observers: Observers,
        incidents: Incidents,
        tape: StepTape,
        written: WrittenState,
        carried: CarriedState,
        own: OwnWork,
        guard: Guard,
        healer: Healer | None = None,
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.cycle = cycle
        self._observers = observers
        self._incidents = incidents
        self.tape = tape
        self._written = written
        self._carried = carried
        self.own = own
        self.guard = guard
        self._healer = healer
        self.on_device = DeviceDecisions(models, self._judge)
        self.current: StepAttempt | None = None  #: of an optimizer, between its begin and its end

    # -- its begin ----------------------------------------------------------------------------------------------

    def begin(self, handed: Any, scaling: ScaleState | None, place: Place | None = None) -> StepAttempt:
        """An optimizer, or what a scaler was handed for one, is about to step, or to be skipped.

        Args:
            handed: The optimizer.
            scaling: The scaler's state; None without one.
            place: The user's line, where it is known.
        """
        opened, (optimizer, index, step) = self.cycle.opened, self.optimizers.begins(handed)
        norm = opened.norms.get(id(optimizer))
        return self._ready(StepAttempt(optimizer, index, step, scaling, opened, norm, handed=handed), place)

    def begin_without(self, weights: list[Tensor]) -> StepAttempt:
        """No optimizer steps ``weights``, whose change is the step."""
        return self._ready(self.expected(weights))

    def expected(self, weights: list[Tensor]) -> StepAttempt:
        """The attempt that the optimizer of ``weights`` has not made yet."""
        opened = self.cycle.opened
        optimizer, index = self.optimizers.of_weights(weights, self.tape.functional.given())
        scaling = ScaleState.of(opened.scaler) if opened.scaler is not None else None
        return StepAttempt(optimizer, index, self.optimizers.step_at(index), scaling, opened)

    def _ready(self, attempt: StepAttempt, place: Place | None = None) -> StepAttempt:
        """An attempt with all that is known of its step, now that its gradients are complete."""
        opened = attempt.opened
        self.gradients_complete()
        self.tape.stop()
        edits, expected = self.tape.mode.edits, True
        with self.guard:
            expected = self.tape.optimizer_comes(attempt, place)
        if attempt.scaling is not None and edits is not None and (edits.edited or not expected):
            with self.guard:
                opened.changed(attempt.optimizer, gradients.total_norm(attempt.optimizer))
        if not opened.losses:
            opened.given(self.tape.functional.losses())
        if opened.bad is not None:
            attempt.bad, attempt.traced, attempt.judging_s = True, opened.bad.traced, opened.bad.judging_s
        self._observers.tell(StepObserver.attempt_began, attempt)
        return attempt

    def backward_ended(self) -> None:
        """Gradients are there: notes their norms where no scaler will, before the loop clips them."""
        may_be_clipped = self.cycle.opened.scaler is None and self.tape.routine.may_change_gradients
        if may_be_clipped and not self.tape.scales_by_hand:
            with self.own, self.guard:
                known = self.optimizers.by_number().values()
                whose: dict[int | None, Any] = {id(each): each for each in known}
                norms = {key: gradients.total_norm(each) for key, each in (whose or self._all()).items()}
                self.cycle.opened.given_norms = {key: norm for key, norm in norms.items() if norm is not None}
                for norm in self.cycle.opened.given_norms.values():
                    self.cycle.opened.send(norm)  # so that whoever has waited for the next norm has this one, too

    def _is_all(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps all that is trained."""
        held = set(map(id, OptimizerView(optimizer).parameters))
        return held.issuperset(map(id, self.models.trained()))

    def _all(self) -> dict[int | None, Any]:
        """Returns a stand-in for the optimizer, which holds all that is trained, before the first has stepped."""
        return {None: stand_in(self.models.trained())}

    def gradients_complete(self) -> None:
        """Unscaling, clipping and stepping follow: nothing of these is ever replayed."""
        self.tape.complete()
        if self.cycle.on(Moment.HAS_GRADIENTS):
            self._observers.tell(StepObserver.gradients_complete)

    def unscaled(self, call: ScalerCall) -> None:
        """A scaler has unscaled the gradients of what it is to step, and looked whether they are finite."""
        opened, optimizer = self.cycle.opened, self.optimizers.who_steps(call.argument)
        opened.unscaled(optimizer, gradients.total_norm(optimizer))
        if not tells_of_steps(call.argument):
            flags = scaler_found_inf(call.scaler, call.argument)
            opened.found_inf[id(call.argument)] = Parcel({str(place): flag for place, flag in enumerate(flags)})

    def was_skipped(self, attempt: StepAttempt) -> bool:
        """Whether a scaler has skipped the optimizer of ``attempt``, of whose step no hook has told."""
        found = attempt.opened.found_inf.pop(id(attempt.handed), None)
        if tells_of_steps(attempt.handed) or (found is not None and found.values()):
            return found is None or any(found.values().values())
        attempt.norm = gradients.total_norm(attempt.optimizer) if attempt.norm is None else attempt.norm
        return attempt.norm is not None and not math.isfinite(attempt.opened.number(attempt.norm))

    # -- what is found ------------------------------------------------------------------------------------------

    def without_scaler(self, attempt: StepAttempt) -> None:
        """``optimizer.step()`` without a scaler (or past it): the one check of the gradients is ours."""
        self._observers.tell(StepObserver.bare_step, BareStep(attempt.optimizer, self.tape.half_forward))
        attempt.norm = attempt.opened.norm
        if attempt.norm is None:
            self.check(attempt)

    def check(self, attempt: StepAttempt, recording: TapedStep | None = None) -> None:
        """Judges the gradients by their norm; with a ``recording`` from when they were given."""
        with self.guard:
            attempt.unclipped = attempt.opened.given_norms.get(id(attempt.optimizer))
            if None in attempt.opened.given_norms and self._is_all(attempt.optimizer):
                attempt.unclipped = attempt.opened.given_norms[None]
            attempt.norm = gradients.total_norm(attempt.optimizer)
            attempt.opened.send(attempt.norm)
            self.found(attempt, verdict.of_unscaled_step(attempt, self.models), recording)

    def check_the_rest(self, attempt: StepAttempt) -> None:
        """Judges what gradients hide: the loss, buffers, what the loop carries."""
        with self.guard:
            poisoned = self._written.turned_bad()
            bad = verdict.of_what_gradients_hide(attempt, poisoned, self._carried.turned_bad())
            if bad is not None and bad.symptom.buffers and self._written.finite_at >= 0:
                finite_at = dict.fromkeys(bad.symptom.buffers, self._written.finite_at)
                bad = bad._replace(evidence=Evidence(finite_at=finite_at))
            self.found(attempt, bad)
            edited = None if attempt.bad else verdict.of_edits(attempt, self.models)
            edits = self.tape.mode.edits
            if edited is not None:
                attempt.norm = attempt.opened.edited[id(attempt.optimizer)]
                self.tape.write_edits()
                self.found(attempt, edited)
            elif len(self.optimizers) > 1:
                self.tape.forget_edits()
            elif not attempt.bad:
                self.tape.learn_edits()
            if edits is not None:
                edits.judged(attempt.optimizer)

    def postpone(self, attempt: StepAttempt) -> None:
        """The device decides whether the optimizer steps: what else there is to judge arrives before its decision."""
        poisoned = self._written.to_be_told()
        hidden = partial(_of_what_gradients_hide, attempt, poisoned, self._carried.to_be_told(attempt))
        self.on_device.postpone(attempt, self.recording(), hidden)

    def check_updates(self, attempt: StepAttempt) -> None:
        """Judges what the loop is about to move weights by; waits for the device."""
        updates = self.tape.evaluation.updates
        if attempt.bad or not updates:
            return
        with self.guard:
            sizes = largest_within([each.tensor for each in updates])
            known = Parcel({str(place): size for place, size in enumerate(sizes)}).values().values()
            bad = [each for each, size in zip(updates, known, strict=True) if not math.isfinite(size or 0.0)]
            recording = self.recording().with_updates(bad) if bad else None
            if recording is not None and recording.updates:
                self._carried.suffered()
                self._judge(attempt, verdict.of_updates(), recording)

    def check_weights(self, attempt: StepAttempt) -> None:
        """Judges weights that have moved before anything of the step was judged; waits for the device, if traced."""
        with self.guard:
            self._incidents.look_at_weights(attempt, of_any_dtype=True)

    def skipped(self, attempt: StepAttempt) -> None:
        """A scaler has skipped the optimizer."""
        self._written.turned_bad()
        self.found(attempt, verdict.of_skip(attempt, self.models))

    def found(self, attempt: StepAttempt, bad: StepVerdict | None, recording: TapedStep | None = None) -> None:
        """Makes an incident of what is ``bad``, unless the attempt has one."""
        if bad is not None and not attempt.bad:
            self._carried.suffered()
            self._judge(attempt, bad, None if self.tape.guard.broken else recording or self.recording())

    def recording(self) -> TapedStep:
        """Returns all that it takes to run the present step again."""
        return self._carried.completed(self.tape.recording())

    def _judge(self, attempt: StepAttempt, bad: StepVerdict, recording: TapedStep | None) -> None:
        self._incidents.judge(attempt, bad, recording)
        self._carried.judged(attempt)

    def healed(self, attempt: StepAttempt) -> bool:
        """Has a step that went bad healed, if it can be; returns whether its optimizer is to step after all."""
        if self._healer is None or not self._healer.wants(attempt):
            return False
        with self.guard:
            edits = self.tape.mode.edits
            follows_read = edits is not None and edits.follows_read
            if edits is not None:
                edits.write()
            recording = self.recording()
            recording = (recording.with_edits(self.models) or recording)._replace(scale=attempt.scale)
            handed = self._healer.hand_over(attempt, recording, follows_read=follows_read)
            attempt.left_out = handed is Handed.LEFT_OUT
            if handed is Handed.REPLACED:
                attempt.norm = gradients.total_norm(attempt.optimizer)
                return True
        return False

    # -- its end ------------------------------------------------------------------------------------------------

    def end(self, attempt: StepAttempt) -> None:
        """The optimizer has stepped, or was skipped."""
        seconds = time.perf_counter() - attempt.opened.began
        if attempt.norm is None:
            attempt.norm = attempt.opened.norms.get(id(attempt.optimizer))
        ended = EndedStep(attempt, self.cycle.attempts, seconds, self.own.ambient)
        self._observers.tell(StepObserver.step_ended, ended)
        attempt.over = True
        with self.guard:
            self._incidents.passed(ended)
            norm = attempt.opened.known_number(attempt.norm)
            self.tape.routine.end(bad=attempt.bad or not attempt.stepped or norm == 0)
        self.optimizers.stepped(attempt, first=self.cycle.is_open)
        self.cycle.on(Moment.ENDS)
        if self.optimizers.all_have_stepped(may_be_more=self.cycle.is_early) and not self.on_device.pending:
            with self.guard:
                self.tape.let_go()


def _of_what_gradients_hide(
    attempt: StepAttempt, poisoned: Callable[[], list[HeldTensor]], note_carried: Callable[[], None]
) -> StepVerdict | None:
    note_carried()
    return verdict.of_what_gradients_hide(attempt, poisoned())
