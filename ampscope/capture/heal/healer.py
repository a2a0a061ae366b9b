"""Heals: does to the live training what a replay of a bad step has proved, and takes it back when it is not needed."""

from __future__ import annotations

from functools import partial
from typing import Any

from ampscope.capture.changes.replaced_calls import LossForms
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.events import (
    EndedStep,
    JoinedScaler,
    RunEnd,
    ScalerCall,
    ScalerMethod,
    StepAttempt,
    StepObserver,
    StepStart,
)
from ampscope.capture.heal import cured_step, in_force, repairs
from ampscope.capture.heal.cure_choice import BadStep
from ampscope.capture.heal.cured_step import Handed, HealingPlan
from ampscope.capture.heal.healing import BEGINS, Healing, HealingLog, TrainingChange
from ampscope.capture.heal.in_force import InForce
from ampscope.capture.heal.lasting_cure import LastingCure
from ampscope.capture.heal.planning import Planner
from ampscope.capture.heal.repairs import ElementsZeroed
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support import dynamo, torch_private
from ampscope.trace.schema import CureKind

#: Bad steps in a row about which nothing could be done, after which healing is of no use.
MOST_IN_A_ROW = 4
TOO_LATE = "its gradients could not be replaced any more when it was judged"


class Healer(StepObserver):
    """Decides on each bad step, and on what is in force; many methods because it hears of all that a step is made of.

    Attributes:
        begins: What is said as a run begins.
        log: Tells of what is done.

    Args:
        engine: Runs steps again, under the guard of healing.
        recorder: What was tried, and at which program points.
        tape: What a replay needs.
        settings: What may be changed.
        log: Tells of it.
    """

    begins = BEGINS

    def __init__(
        self,
        engine: RerunEngine,
        recorder: Recorder,
        tape: StepTape,
        settings: Healing,
        log: HealingLog,
    ) -> None:
        self.guard = engine.guard
        self._models = engine.models
        self._recorder = recorder
        self._tape = tape
        self._budget = engine.budget
        self._settings = settings
        self.log = log
        self._plan: HealingPlan | None = None
        self._examined: StepAttempt | None = None  # the latest
        self._loss = tape.mode.otherwise = LossForms()
        self._in_force = InForce(settings, log, self._loss)
        self._planner = Planner(engine, recorder, settings, self._in_force, log)
        self._in_a_row = 0  # bad steps about which nothing was done
        self._was_good = True  # the step before
        self._is_over = False
        self._graphs: int | None = None  # compiled before the latest change; None where that is told, or none was made
        tape.state.keeps_before = settings.allows(CureKind.STATE)

    def allows(self, kind: CureKind) -> bool:
        """Whether there may be changes of a kind, still."""
        return self._settings.allows(kind) and not self._is_over and not self.guard.broken

    # -- a bad step ---------------------------------------------------------------------------------------------

    def examine(self, bad: BadStep) -> None:
        """Decides what is to be done about a step that went bad, before its weights have moved."""
        if self._is_over or self.guard.broken:
            return
        plan, first = self._plan, self._examined
        self._finish()
        if first is not None and first.opened is bad.attempt.opened and first is not bad.attempt:
            left_out = plan is not None and plan.handed is Handed.LEFT_OUT
            self._plan = self._planner.of_another(bad, left_out=left_out)
            return
        self._examined = bad.attempt
        with self.guard:
            self._plan = self._planner.plan(bad, after_good_step=self._was_good)

    # -- the step itself ----------------------------------------------------------------------------------------

    def wants(self, attempt: StepAttempt) -> bool:
        """Whether something is to be done about the step of an attempt now, before its optimizer is passed by."""
        plan = self._plan
        return plan is not None and plan.attempt is attempt and not self.guard.broken

    def hand_over(self, attempt: StepAttempt, recording: TapedStep, *, follows_read: bool) -> Handed:
        """Gives the step finite gradients, or leaves it out.

        Args:
            attempt: Went bad; its optimizer has not stepped.
            recording: The step, with all that the loop did to its gradients.
            follows_read: The loop changed them after it had read numbers of them.
        """
        plan = self._plan
        if plan is None or plan.attempt is not attempt:
            return Handed.NOTHING
        with self.guard:
            if plan.kind is CureKind.LEFT_OUT:
                plan.why_not = self._planner.leaving_out.leave_out(attempt)
                plan.handed = Handed.NOTHING if plan.why_not else Handed.LEFT_OUT
            elif not (plan.why_not or plan.is_finite):
                plan.why_not = self._replace(plan, recording, follows_read=follows_read)
                plan.handed = self._planner.left_out_instead(plan) if plan.why_not else Handed.REPLACED
            plan.cured = None
        return plan.handed

    def leave_out(self, attempt: StepAttempt, text: str) -> None:
        """Has an optimizer do nothing that is about to step, and would spoil what is finite, if that can be."""
        reason = self._planner.leaving_out.leave_out(attempt, is_called=True)
        attempt.left_out = not reason
        if reason:
            self.log.declined(attempt.step, reason)
        else:
            self.log.made(TrainingChange(attempt.step, attempt.index, CureKind.LEFT_OUT, text))

    def keep(self, cure: LastingCure, attempt: StepAttempt) -> None:
        """Makes a change that was proved on copies, for the step of an attempt and those after it."""
        change = TrainingChange(attempt.step, attempt.index, cure.kind, cure.text, cure.modules, cure.code, cure.detail)
        if self._planner.may_last(attempt, cure) and self._in_force.apply(cure, change):
            self.log.made(change, at_once=True)

    def _replace(self, plan: HealingPlan, recording: TapedStep, *, follows_read: bool) -> str:
        optimizer, scaling = plan.attempt.optimizer, plan.attempt.scaling
        reason = cured_step.why_not_handed_over(recording, optimizer, self._models)
        if not reason and isinstance(plan.change, ElementsZeroed) and not plan.change.is_all_of(optimizer):
            reason = "its optimizer does not step all of them"
        if reason or follows_read:
            return reason or cured_step.DECIDED_BY_THEM
        edited = recording.edited or recording.edits
        cured = self._planner.run(recording, plan.change) if edited or plan.cured is None else plan.cured
        if cured.reason:
            return cured.reason
        scale = scaling.scale if scaling is not None else None
        why_not = partial(self._planner.good_steps.why_not, plan.attempt)
        reason = cured_step.hand_over(cured, optimizer, self._models, scale, why_not)
        if not reason and isinstance(plan.change, ElementsZeroed):
            plan.change.make()
        if not reason and scaling is not None:
            clear_flags(scaling.scaler, optimizer)
        return reason

    def _finish(self) -> None:
        """Does what lasts of the latest plan, and tells of it."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        attempt = plan.attempt
        if plan.handed is Handed.REPLACED and not plan.has_ended:
            plan.handed, plan.why_not = Handed.NOTHING, "its optimizer was left by an exception"
        self._restore(plan)
        if plan.is_told:
            return
        replaced = plan.handed is Handed.REPLACED
        modules = plan.cure.modules if plan.cure is not None else tuple(plan.poisoned)
        code = plan.cure.code if plan.cure is not None else ""
        detail = plan.cure.detail if plan.cure is not None else {}
        change = TrainingChange(attempt.step, attempt.index, plan.kind, plan.text, modules, code, detail, replaced)
        if plan.cure is None and plan.handed is Handed.NOTHING and not plan.is_repair:
            self.log.declined(attempt.step, plan.why_not or TOO_LATE)
            return
        graphs = dynamo.graphs_compiled()
        if plan.cure is not None and not self._in_force.apply(plan.cure, change):
            return
        self._graphs = graphs if plan.cure is not None and self._models.compiled else None
        self.log.made(change, why_not_applied="" if plan.is_finite else plan.why_not or TOO_LATE)

    def _restore(self, plan: HealingPlan) -> None:
        """Gives buffers their last finite values, if the step with the cure has not."""
        if plan.handed is not Handed.REPLACED and not (plan.restored or plan.is_finite):
            if isinstance(plan.change, ElementsZeroed):
                self._planner.due.append(plan.change)
            repairs.put_back_poisoned(plan.poisoned)
            repairs.undo_poisoning(plan.recording.state)
        plan.restored = True

    def _resume(self) -> None:
        """Makes again what the run had changed when it ended before."""
        for step, text in self._recorder.cures:
            found = in_force.resumed_of_models(step, text, self._models, self._loss)
            if found is not None and self._in_force.apply(*found):
                self.log.again(found[1])

    # -- observing ----------------------------------------------------------------------------------------------

    def step_began(self, start: StepStart) -> None:
        """Does, before the first forward of a step, what was decided on the one before."""
        if start.number == 0:
            self.log.line("on", self.begins)
            self._resume()
        self._planner.leaving_out.give_scale_back()
        self._finish()
        repairs.make_due(self._planner.due)

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Takes up what a look at a seemingly good step has cured; checks whether what is in force is still needed."""
        if self._is_over:
            return
        if not attempt.bad:
            self._in_force.look(attempt, lambda change: self._finite_with(attempt, change), self._budget)
            self._in_force.measure(attempt.step, lambda change: self._seconds_with(attempt, change), self._budget)
        if self._plan is None and attempt is not self._examined:
            self._plan = self._planner.after_look(attempt, self._tape.recording())

    def _finite_with(self, attempt: StepAttempt, change: ReplayChange) -> bool:
        recording = self._tape.recording()._replace(scale=attempt.scale)
        return not recording.has_received() and not self._planner.run(recording, change).reason

    def _seconds_with(self, attempt: StepAttempt, change: ReplayChange) -> float | None:
        again = self._planner.run(self._tape.recording()._replace(scale=attempt.scale), change)
        return again.seconds if again.was_run else None

    def scaler_joined(self, joined: JoinedScaler) -> None:
        """A scale that was bounded when the run ended before is so again."""
        found = [in_force.resumed_of_scaler(step, text, joined.scaler) for step, text in self._recorder.cures]
        for each in filter(None, found):
            if self._in_force.apply(*each):
                self.log.again(each[1])

    def scaler_call_began(self, call: ScalerCall) -> None:
        """Gives a scaler its scale back before its state is saved: steps that were left out must not show in it."""
        if call.method is ScalerMethod.STATE_DICT:
            self._planner.leaving_out.give_scale_back()

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """A bound on the loss scale is held when the scaler has grown."""
        if call.method is ScalerMethod.UPDATE:
            self._in_force.hold(call.scaler)

    def step_ended(self, ended: EndedStep) -> None:
        """Counts what came of it; healing ends where it does not help."""
        attempt = ended.attempt
        if self._plan is not None and self._plan.attempt is attempt:
            self._plan.has_ended = True
            self._restore(self._plan)
        self._planner.leaving_out.ended(attempt)
        self._planner.good_steps.ended(attempt)
        self._was_good = not attempt.bad
        went_bad = self._went_bad(ended)
        if self._graphs is not None and self._was_good:
            self.log.recompiled(attempt.step, dynamo.graphs_compiled() - self._graphs)
            self._graphs = None
        is_saved = self._plan is not None and self._plan.handed is not Handed.NOTHING
        if went_bad or not attempt.bad:
            self._in_a_row = self._in_a_row + 1 if went_bad and not is_saved else 0
        if self._planner.leaving_out.in_a_row == MOST_IN_A_ROW:
            self.log.stands_still(attempt.step, MOST_IN_A_ROW)
        self._in_force.settle(attempt.step)
        if self._was_good and not attempt.traced:
            self._in_force.took(ended.seconds - attempt.judging_s)
        does_something = self._plan is not None or bool(self._in_force)
        if self._in_a_row >= MOST_IN_A_ROW and does_something and not self._is_over:
            self._end(attempt.step, f"{MOST_IN_A_ROW} steps in a row went bad all the same")

    def _went_bad(self, ended: EndedStep) -> bool:
        """Whether a step counts among those that healing is there for."""
        return ended.attempt is self._planner.failing

    def _end(self, step: int, why: str) -> None:
        self._finish()
        self._is_over = True
        self._in_force.lift_all(step, why)
        self.log.ended(step, why)

    def run_ended(self, end: RunEnd) -> None:
        """Tells how to keep what is in force, and leaves the model as it was."""
        self._planner.leaving_out.give_scale_back()
        self._finish()
        repairs.make_due(self._planner.due)
        self._in_force.close()


def clear_flags(scaler: Any, optimizer: Any) -> None:
    """The scaler has found something that is gone, or has nothing to do with its scale."""
    for flag in torch_private.scaler_found_inf(scaler, optimizer):
        flag.zero_()
