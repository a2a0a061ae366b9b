"""Plans what is to be done about a bad step: tried on the step itself before anything of the training is changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ampscope.capture.changes import failure
from ampscope.capture.changes.failure import OpKey
from ampscope.capture.changes.replay_change import EverythingIn, ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, Symptom, TrialResult
from ampscope.capture.events import StepAttempt
from ampscope.capture.heal import cured_step, repairs
from ampscope.capture.heal.cure_choice import BadStep, lasting, misses_float32
from ampscope.capture.heal.cured_step import CuredStep, Handed, HealingPlan
from ampscope.capture.heal.healing import Healing, HealingLog
from ampscope.capture.heal.in_force import InForce
from ampscope.capture.heal.lasting_cure import HEADROOM, LastingCure, ScaleBound
from ampscope.capture.heal.module_cures import Both, ModulesKept, OutputsNoted
from ampscope.capture.heal.repairs import ElementsZeroed, LeavingOut
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.capture.tape.tape_entry import EntryKind
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.trace.schema import Change, CureKind, ReplayStatus, Trial

#: Gradients so many times as large as the largest of the good steps before are none of this training's.
FAR = 100.0
_KEPT = 16


class StepsBefore:
    """The good steps before a bad one; nothing of them is read before a step goes bad."""

    def __init__(self) -> None:
        self._norms: dict[int, deque[Tensor]] = {}  # of gradients as the optimizer got them, by its number
        self._together: set[int] = set()  # numbers of optimizers that have ended one step with others
        self._latest: StepAttempt | None = None

    def ended(self, attempt: StepAttempt) -> None:
        """An attempt is over."""
        latest, self._latest = self._latest, attempt
        if latest is not None and latest.opened is attempt.opened and latest.index != attempt.index:
            self._together |= {latest.index, attempt.index}
        norm = attempt.opened.edited.get(id(attempt.optimizer), attempt.norm)
        if norm is not None and attempt.stepped and not attempt.bad:
            self._norms.setdefault(attempt.index, deque(maxlen=_KEPT)).append(norm)

    def shares_step(self, attempt: StepAttempt) -> bool:
        """Whether the optimizer of an attempt has been seen to end a step with others."""
        return attempt.index in self._together

    def why_not(self, attempt: StepAttempt, norm: Tensor | None) -> str:
        """Why a bad step must not be made with gradients of this norm, in words; empty where it may."""
        if self.shares_step(attempt):
            return "several optimizers share the step, and all of them or none may make it"
        known = [float(each) for each in self._norms.get(attempt.index, ())]
        if not known or norm is None:
            return "no good step before it shows how large its gradients may be"
        size, most = float(norm), max(known)
        if size > FAR * most:
            return f"its gradients would have a norm of {size:.3g}; in good steps before it was at most {most:.3g}"
        return ""


#: Overflows by the loss scale alone, each after a good step, and within how many steps: not how a scaler works.
OSCILLATES, WITHIN = 4, 9
#: Why a step is lost though a cure was proved on it.
TOO_LARGE = "with it, gradients overflow by the loss scale, which the scaler lowers"


class Planner:
    """Finds what helps, by replays of the bad step.

    Args:
        engine: Runs steps again.
        recorder: What was tried, and at which program points.
        settings: What may be changed.
        in_force: The changes that last.
        log: Is told why nothing can be done.
    """

    def __init__(
        self, engine: RerunEngine, recorder: Recorder, settings: Healing, in_force: InForce, log: HealingLog
    ) -> None:
        self._engine = engine
        self._models = models = engine.models
        self._recorder = recorder
        self._settings = settings
        self._in_force = in_force
        self._log = log
        self._tried: dict[OpKey, Sequence[TrialResult]] = {}  # what was tried on the latest step that failed at an op
        self._by_scale: list[int] = []  # steps that overflowed by the loss scale alone
        self._as_before: tuple[int, int, Symptom] | None = None  # the step after one that was repaired, or left out
        self.failing: StepAttempt | None = None  #: the latest, if its gradients failed for more than the loss scale
        self.good_steps = StepsBefore()  #: what they have shown
        self.leaving_out = LeavingOut(models)  #: leaves steps out
        self.due: list[ElementsZeroed] = []  #: once no graph needs the weights as they are

    def plan(self, bad: BadStep, *, after_good_step: bool) -> HealingPlan | None:
        """Finds what helps on a step that went bad, before its weights have moved; None where nothing is to be done."""
        self.failing = None
        if bad.rows is None:
            if self._as_before == (bad.attempt.index, bad.attempt.step, bad.symptom):
                return self._repaired(bad) or self._leaves_out(bad, "as the step before it, which went bad alike")
            reason = bad.outcome.reason or "its ops show nothing of what went wrong"
            return self._nothing(bad, f"it could not be run again ({reason})")
        self.failing = bad.attempt if bad.symptom.gradients else None
        bad = self._with_known(bad)
        if bad.outcome.status is ReplayStatus.NOT_REPRODUCED:
            return self._of_accident(bad)
        plan = self._of_state(bad)
        if plan is None and bad.is_of_scale:
            self.failing = None
            return self._of_scale(bad, after_good_step=after_good_step)
        plan = plan or self._lasting(bad)
        if plan is None and bad.is_beyond_precision and not bad.is_only_of_loss:
            plan = self._repaired(bad) or self._left_out(bad)
        if plan is None and not bad.is_only_of_loss:  # then its optimizer steps by gradients that are finite
            return self._nothing(bad, "no cure was proved on it")
        return plan

    def of_another(self, bad: BadStep, *, left_out: bool) -> HealingPlan | None:
        """Plans what is done with an optimizer that comes after another one of the same step that went bad.

        Args:
            bad: The step of this one; nothing of it can be run again.
            left_out: The other one was: what holds for one of a step holds for all.
        """
        if left_out:
            return HealingPlan(bad.attempt, CureKind.LEFT_OUT, "", bad.recording, is_told=True)
        goes_on = bad.attempt.scaling is not None or bad.is_only_of_loss
        return None if goes_on else self._nothing(bad, "another optimizer of the same step went bad before it")

    def _nothing(self, bad: BadStep, why: str) -> HealingPlan | None:
        """Handles a step without a proved cure: leaves it out if no scaler skips it, for it would ruin the weights."""
        ruins = bad.attempt.scaling is None and not bad.is_only_of_loss
        if ruins and self.leaving_out.unproved and self._settings.allows(CureKind.LEFT_OUT):
            return self._leaves_out(bad, f"for {why}")
        self._log.declined(bad.attempt.step, why)
        return None

    def _with_known(self, bad: BadStep) -> BadStep:
        """A step with what has cured earlier ones that failed alike; a search goes on where the last one stopped.

        All in float32 is tried again: it may be another fault at the same place. Cures are, in any case.
        """
        located = failure.located(bad.rows, scaled=bad.attempt.scaling is not None) if bad.rows is not None else None
        if located is None:
            return bad
        known = [each for each in self._tried.get(located.op, ()) if each not in bad.tried]
        tried = [*bad.tried, *known]
        is_known = any(each.change is Change.FP32 for each in bad.tried)
        if not is_known and not bad.came_out(Change.SCALE, Trial.FINITE):
            wide = self.run(bad.recording, EverythingIn(torch.float32))
            outcome = Trial.NONFINITE if wide.reason else Trial.FINITE
            result = ChangedResult(outcome if wide.was_run else Trial.UNAVAILABLE)
            tried = [TrialResult(Change.FP32, (), (), None, result), *tried]
        well = [each for each in tried if each.result.outcome is Trial.FINITE and not misses_float32(each, tried)]
        self._tried[located.op] = [each for each in well if each.change is not Change.FP32]
        return bad._replace(tried=tried)

    def _of_state(self, bad: BadStep) -> HealingPlan | None:
        """Plans to put back buffers that the step found poisoned, if it is finite from what they held before."""
        found = (
            repairs.found_poisoned(bad.recording.state, self._models) if self._settings.allows(CureKind.STATE) else {}
        )
        if not found:
            if name := repairs.poisoned_out_of_reach(bad.recording.state):
                self._log.declined(bad.attempt.step, f"{name} is not finite, and lies in what an attribute holds")
            return None
        repairs.begin_from(bad.recording.state, found, finite_values=True)
        cured = self.run(bad.recording, ReplayChange())
        if cured.reason:
            repairs.begin_from(bad.recording.state, found, finite_values=False)
            return None
        text = f"{', '.join(found)} put back to what {'it' if len(found) == 1 else 'they'} held a step before"
        return HealingPlan(bad.attempt, CureKind.STATE, text, bad.recording, cured=cured, poisoned=found)

    def _of_accident(self, bad: BadStep) -> HealingPlan | None:
        """A step that comes out finite when it is run again, each time.

        Of one with several forwards nobody knows whether the loop set something of the model's between them, which a
        replay does not.
        """
        reason = "it gave other values when it was run again"
        if bad.is_not_its_own and self._settings.allows(CureKind.RUN_AGAIN):
            reason = "it came out finite when it was run again, but the loop may have changed the model within the step"
            if sum(entry.kind is EntryKind.MODULE for _, entry in bad.recording.entries()) == 1:
                cured = self.run(bad.recording, ReplayChange())
                text = "the same calls came out finite when they were run again"
                if not cured.reason:
                    return HealingPlan(bad.attempt, CureKind.RUN_AGAIN, text, bad.recording, cured=cured)
                reason = cured.reason
        return self._nothing(bad, reason)

    def _of_scale(self, bad: BadStep, *, after_good_step: bool) -> HealingPlan | None:
        """The scaler backs off by itself; a scale that keeps coming back is bounded."""
        step, scaling = bad.attempt.step, bad.attempt.scaling
        self._by_scale = [each for each in self._by_scale if step - each < WITHIN]
        self._by_scale += [step] if after_good_step else []
        fits = (each for each in bad.tried if each.result.outcome is Trial.FINITE)
        best = max((each.scale or 0.0 for each in fits if each.change is Change.SCALE), default=0.0)
        if len(self._by_scale) < OSCILLATES or best <= 1.0 or scaling is None:
            return None
        bound = ScaleBound(scaling.scaler, max(best / HEADROOM, 1.0))
        if not self.may_last(bad.attempt, bound):
            return None
        self._by_scale.clear()
        return HealingPlan(
            bad.attempt, bound.kind, bound.text, bad.recording, cure=bound, why_not="it overflowed by its scale"
        )

    def _lasting(self, bad: BadStep) -> HealingPlan | None:
        scaler = bad.attempt.scaling.scaler if bad.attempt.scaling is not None else None
        cures = lasting(bad.tried, bad.rows, self._recorder.sites, self._models, scaler, self._in_force.loss)
        ways = (way for cure in cures for way in self._giving_back(bad.recording, cure))
        return next(filter(None, (self._proved(bad, cure) for cure in ways)), None)

    def _giving_back(self, recording: TapedStep, cure: LastingCure) -> Iterator[LastingCure]:
        """A cure, first so that code which reads what the modules return finds the dtype that it had."""
        kept = cure.kept if isinstance(cure, Both) else cure
        if not isinstance(kept, ModulesKept) or not self._settings.allows(cure.kind):
            yield cure
            return
        noted = OutputsNoted(kept.modules)
        self.run(recording, noted)
        for way in kept.giving_back(noted.half()):
            yield cure.with_kept(way) if isinstance(cure, Both) else way

    def left_out_instead(self, plan: HealingPlan) -> Handed:
        """Leaves out a step that is not given other gradients, if no scaler does: its own would ruin the weights."""
        is_skipped = plan.attempt.scaling is not None
        if is_skipped or not self._settings.allows(CureKind.LEFT_OUT) or self.leaving_out.leave_out(plan.attempt):
            return Handed.NOTHING
        if plan.cure is None and not plan.is_repair:
            plan.kind, plan.text, plan.why_not = CureKind.LEFT_OUT, f"left out, for {plan.why_not}", ""
        return Handed.LEFT_OUT

    def _repaired(self, bad: BadStep) -> HealingPlan | None:
        """Finds a change that helps on this one step, where precision has no part in it."""
        for kind, text, change, rivals in repairs.repairs_of_step(bad.recording, self._models):
            cured = self.run(bad.recording, change) if self._settings.allows(kind) else None
            if cured is not None and not (cured.reason or any(self.run(bad.recording, o).was_run for o in rivals)):
                self._note_for_next(bad)
                return HealingPlan(bad.attempt, kind, text, bad.recording, change, cured=cured)
        return None

    def _left_out(self, bad: BadStep) -> HealingPlan | None:
        if not self._settings.allows(CureKind.LEFT_OUT):
            return None
        spoilt = any(repairs.is_bad_weight(parameter) for _, parameter in self._models.parameters.values())
        why = "weights of the model are not finite" if spoilt else "it is not finite in float32 either"
        return self._leaves_out(bad, f"for {why}")

    def _leaves_out(self, bad: BadStep, why: str) -> HealingPlan:
        self._note_for_next(bad)
        kept = ", and the loss scale kept" if bad.attempt.scaling is not None else ""
        return HealingPlan(bad.attempt, CureKind.LEFT_OUT, f"left out, {why}{kept}", bad.recording)

    def _note_for_next(self, bad: BadStep) -> None:
        """The next step, if it goes bad alike, is dealt with alike though replays have used up their time."""
        self._as_before = bad.attempt.index, bad.attempt.step + 1, bad.symptom

    def _proved(self, bad: BadStep, cure: LastingCure) -> HealingPlan | None:
        if not self.may_last(bad.attempt, cure):
            return None
        change = cure.change()
        cured = self.run(bad.recording, change)
        why_not = ""
        if cured.reason and cure.fitting_scale is not None:
            change.scale, why_not = cure.fitting_scale, TOO_LARGE
            cured = self.run(bad.recording, change)
        if cured.reason:
            return None
        return HealingPlan(
            bad.attempt, cure.kind, cure.text, bad.recording, cure.change(), cure, cured, why_not=why_not
        )

    def after_look(self, attempt: StepAttempt, recording: TapedStep) -> HealingPlan | None:
        """Plans what helps from the next step on, as tried with success in a look at a step that is finite."""
        tried = [each for *of, each in self._recorder.tried if of == [attempt.step, attempt.index]]
        scaler = attempt.scaling.scaler if attempt.scaling is not None else None
        for cure in lasting(tried, None, self._recorder.sites, self._models, scaler, self._in_force.loss):
            if self.may_last(attempt, cure):
                *_, cure = self._giving_back(recording, cure)  # noqa: PLW2901  # the one that changes no gradient
                cure.by_finiteness = False
                return HealingPlan(attempt, cure.kind, cure.text, recording, cure.change(), cure, is_finite=True)
        return None

    def may_last(self, attempt: StepAttempt, cure: LastingCure) -> bool:
        """Whether there may be a change; where not, it is told why."""
        if not self._settings.allows(cure.kind):
            return False
        reason = self._in_force.why_not(cure, compiled=self._models.compiled)
        if reason:
            self._log.declined(attempt.step, reason)
        return not reason

    def run(self, recording: TapedStep, change: ReplayChange) -> CuredStep:
        """Runs a step with a change."""
        return cured_step.run(self._engine, recording, change)
