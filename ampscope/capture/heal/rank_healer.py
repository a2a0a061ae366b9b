"""Healing on one of several ranks: nothing is changed here that is not changed on all."""

from __future__ import annotations

import dataclasses
import json
import math

from torch import Tensor

from ampscope.capture.events import EndedStep, StepAttempt
from ampscope.capture.heal import cured_step
from ampscope.capture.heal.cure_choice import BadStep
from ampscope.capture.heal.cured_step import Handed, HealingPlan
from ampscope.capture.heal.healer import Healer, clear_flags
from ampscope.capture.heal.healing import BEGINS, Healing, HealingLog
from ampscope.capture.heal.rank_agreement import Agreed, Agreement, Proposal, edited
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.process_group import Ballot
from ampscope.trace.schema import CureKind

#: What ranks can agree on: a change that each can try on its own part of the step, or a step that none makes.
_KINDS = (CureKind.MODULES_FP32, CureKind.CONVERSIONS, CureKind.LOSS_SCALE, CureKind.LEFT_OUT)
_NOT_RUN = "the step was not run again"


def _on_ranks(settings: Healing) -> Healing:
    """Settings under which nothing is decided by what one rank sees alone: its good steps, or how long they take."""
    kinds = [kind for kind in _KINDS if settings.allows(kind)]
    return dataclasses.replace(settings, kinds=kinds, quiet_steps=0, max_slowdown=math.inf)


class RankHealer(Healer):
    """Proposes what it has proved to the other ranks, and does what all have agreed on.

    Args:
        engine: Runs steps again, under the guard of healing.
        recorder: What was tried, and at which program points.
        tape: What a replay needs.
        settings: What may be changed.
        log: Tells of it.
        ballot: By which the ranks decide.
    """

    begins = f"{BEGINS}; the ranks tell each other at steps that go bad"

    def __init__(
        self,
        engine: RerunEngine,
        recorder: Recorder,
        tape: StepTape,
        settings: Healing,
        log: HealingLog,
        ballot: Ballot,
    ) -> None:
        super().__init__(engine, recorder, tape, _on_ranks(settings), log)
        with Suppressed():  # without a store that answers, nothing is agreed on later either
            had = json.loads(ballot.settled("resumed", json.dumps(recorder.cures)))
            recorder.cures = tuple((int(step), str(text)) for step, text in had)
        self._planner.leaving_out.unproved = False  # what one rank leaves out, the others would make
        self._agreement = Agreement(ballot, engine.models, self._planner.run, self._planner.may_last)
        self._first = dict(recorder.next_step)  # by optimizer: the number of its first step here
        self._mine: tuple[StepAttempt, Proposal] | None = None
        self._asked: StepAttempt | None = None  # the latest step on which ranks were asked

    # -- a bad step ---------------------------------------------------------------------------------------------

    def examine(self, bad: BadStep) -> None:
        """Notes what this rank has proved on its own part of a step; decides nothing yet."""
        if self._is_over or self.guard.broken:
            return
        self._finish()
        self._mine = None
        with self.guard:
            self._mine = bad.attempt, self._proposal(bad)

    def _proposal(self, bad: BadStep) -> Proposal:
        if bad.outcome.failed_elsewhere:
            return Proposal(is_fine=True)
        plan = self._planner.plan(bad, after_good_step=self._was_good)
        if plan is None:
            why = "" if bad.is_of_scale else bad.outcome.reason or "no cure was proved"
            return Proposal(why_not=why)
        detail = plan.cure.detail if plan.cure is not None else {}
        if not detail and plan.kind is not CureKind.LEFT_OUT:
            return Proposal(why_not="what was proved holds for one rank alone")
        return Proposal(kind=plan.kind, text=plan.text, detail=detail)

    # -- the step itself ----------------------------------------------------------------------------------------

    def wants(self, attempt: StepAttempt) -> bool:
        """Whether the gradients of a step, averaged over all ranks, are not finite: all ranks know that alike."""
        if self._is_over or not _is_everywhere(attempt):
            return False
        if self.guard.broken or self._tape.guard.broken:
            self._refuse(attempt, "a part of ampscope is switched off")
            return False
        return True

    def hand_over(self, attempt: StepAttempt, recording: TapedStep, *, follows_read: bool) -> Handed:
        """Asks the other ranks, and does what all have agreed on.

        Args:
            attempt: Went bad; its optimizer has not stepped.
            recording: The step, with all that the loop did to its gradients.
            follows_read: The loop changed them after it had read numbers of them.
        """
        question = self._question(attempt)
        self._asked, self._plan = attempt, None
        with self.guard:
            mine = self._mine[1] if self._mine is not None and self._mine[0] is attempt else None
            lost = cured_step.DECIDED_BY_THEM if follows_read else ""
            proposal = mine or Proposal(why_not=_NOT_RUN)
            agreed = self._agreement.reach(question, attempt, recording, proposal, lost)
            self._ends(attempt, agreed)
            if agreed.decision.is_made:
                self._plan = self._made(attempt, recording, agreed)
        if self.guard.broken:
            self._refuse(attempt, "healing has switched itself off")
        return self._plan.handed if self._plan is not None else Handed.NOTHING

    def _made(self, attempt: StepAttempt, recording: TapedStep, agreed: Agreed) -> HealingPlan:
        cure, why_not = agreed.cure, agreed.decision.why_not
        if cure is None:
            kind = CureKind.LEFT_OUT
            plan = HealingPlan(attempt, kind, agreed.proposal.text, recording, handed=Handed.LEFT_OUT)
            self._planner.leaving_out.leave_out(attempt)
            return plan
        plan = HealingPlan(attempt, cure.kind, cure.text, recording, cure.change(), cure, why_not=why_not)
        if agreed.cured is not None:
            scaling = attempt.scaling
            scale = scaling.scale if scaling is not None else None
            asked: list[str] = []

            def may_not(norm: Tensor | None) -> str:
                own = self._planner.good_steps.why_not(attempt, norm)
                asked.append(self._agreement.all_may(self._question(attempt), own))
                return asked[0]

            cured = edited(recording, agreed.cured, self._planner.run)
            plan.why_not = cured.reason or cured_step.hand_over(cured, attempt.optimizer, self._models, scale, may_not)
            if not asked:  # it was refused before
                self._agreement.all_may(self._question(attempt), plan.why_not)
            plan.handed = Handed.NOTHING if plan.why_not else Handed.REPLACED
            if scaling is not None and plan.handed is Handed.REPLACED:
                clear_flags(scaling.scaler, attempt.optimizer)
        return plan

    def _ends(self, attempt: StepAttempt, agreed: Agreed) -> None:
        decision = agreed.decision
        if decision.is_last:
            self._is_over = True
            self.log.ended(attempt.step, decision.why_not)
        elif decision.why_not and not decision.is_made:
            self.log.declined(attempt.step, decision.why_not)

    def _refuse(self, attempt: StepAttempt, why: str) -> None:
        """Lets no other rank wait for this one."""
        self._is_over = True
        with Suppressed():
            self._ends(attempt, self._agreement.refuse(self._question(attempt), why))

    def _question(self, attempt: StepAttempt) -> str:
        """Names a step for all ranks: by how many its optimizer has made since the run was begun, or resumed."""
        return f"{attempt.index}-{attempt.step - self._first.get(attempt.index, 0)}"

    # -- observing ----------------------------------------------------------------------------------------------

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Does nothing, for a good step of one rank decides nothing."""

    def _went_bad(self, ended: EndedStep) -> bool:
        return ended.attempt is self._asked


def _is_everywhere(attempt: StepAttempt) -> bool:
    """Whether a step went bad by its gradients, before its optimizer has written anything."""
    if attempt.scaling is not None:
        return not attempt.stepped and not attempt.on_device
    return attempt.bad and attempt.norm is not None and not math.isfinite(attempt.norm)
