"""Brings the ranks of a job to one decision on a step that went bad on all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.heal import cured_step, resumed
from ampscope.capture.heal.cured_step import CuredStep
from ampscope.capture.heal.cures.lasting_cure import LastingCure
from ampscope.capture.heal.ranks.edited import as_averaged
from ampscope.capture.heal.ranks.votes import Decision, Proposal, Tried, decided, together
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.torch_support.communication import averaging
from ampscope.capture.torch_support.communication.averaging import Averaging
from ampscope.capture.torch_support.communication.ballot import Ballot
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import CureKind

_IN_TIME = "a rank has not said in time what it has proved"
_NOT_AVERAGED = "gradients are not averaged over all ranks, by DistributedDataParallel and nothing else"


class Agreed(NamedTuple):
    """The decision that all ranks have come to on a step."""

    decision: Decision
    proposal: Proposal
    cure: LastingCure | None = None  #: None where nothing lasts
    cured: CuredStep | None = None  #: with the gradients of all ranks; None where they were not averaged


class _Own(NamedTuple):
    """Holds what this rank can do towards the proposal."""

    tried: Tried
    cure: LastingCure | None = None
    cured: CuredStep | None = None
    flat: Averaging | None = None


class Agreement:
    """Asks and answers, once for each step that went bad.

    Every rank goes through the same questions in the same order, or settles the step for all of them. Which steps
    these are, all ranks know alike: those whose gradients are not finite once they are averaged over all of them.

    Args:
        ballot: Holds the votes.
        models: The watched models.
        run: Runs a step with a change.
        may_last: Whether there may be a cure.
    """

    def __init__(
        self,
        ballot: Ballot,
        models: Models,
        run: Callable[[TapedStep, ReplayChange], CuredStep],
        may_last: Callable[[StepAttempt, LastingCure], bool],
    ) -> None:
        self._ballot = ballot
        self._models = models
        self._run = run
        self._may_last = may_last

    def refuse(self, question: str, why: str) -> Agreed:
        """Settles that this rank can take no part, now or later: no rank heals any more."""
        return self._settled(question, Decision(why_not=f"on rank {self._ballot.rank}, {why}", is_last=True))

    def reach(self, question: str, attempt: StepAttempt, step: TapedStep, mine: Proposal, lost: str) -> Agreed:
        """Decides with all other ranks what to do about a step; communicates.

        Args:
            question: By which all ranks know it.
            attempt: Went bad; its optimizer has not stepped.
            step: With all that the loop did to its gradients.
            mine: What this rank has proved.
            lost: Why its gradients must not be replaced; empty where they may.
        """
        missing = self._ballot.missing()
        if missing:
            ranks = ", ".join(map(str, missing[:4]))
            return self._settled(question, Decision(why_not=f"there is no healing on rank {ranks}", is_last=True))
        group = step.averaged_in()
        if group is None or group.size() != self._ballot.ranks:
            return self.refuse(question, _NOT_AVERAGED)
        votes = self._ballot.votes(f"{question}/proved", mine.written())
        if votes is None:
            return self._settled(question, Decision(why_not=_IN_TIME, is_last=True))
        proposal = together([Proposal.read(vote) for vote in votes])
        if not proposal.kind:
            return self._settled(question, Decision(why_not=proposal.why_not))
        own = self._own(proposal, attempt, step, lost)
        tried = self._ballot.votes(f"{question}/tried", own.tried.written())
        if tried is None:
            return self._settled(question, Decision(why_not=_IN_TIME, is_last=True))
        return self._done(self._settled(question, decided([Tried.read(each) for each in tried])), proposal, own, group)

    def all_may(self, question: str, why_not: str) -> str:
        """Whether every rank can make a step with the gradients of all: no rank makes it that another one does not.

        Args:
            question: See `reach`; its decision was to average.
            why_not: Why this rank cannot; empty where it can.

        Returns:
            Why no rank does; empty where all do.
        """
        question = f"{question}-made"
        votes = self._ballot.votes(f"{question}/may", Tried(why_lost=why_not).written())
        own = decided([Tried.read(vote) for vote in votes]) if votes else Decision(why_not=_IN_TIME)
        decision = self._settled(question, own).decision
        return "" if decision.is_averaged else decision.why_not

    def _settled(self, question: str, decision: Decision) -> Agreed:
        return Agreed(Decision.read(self._ballot.settled(question, decision.written())), Proposal())

    def _own(self, proposal: Proposal, attempt: StepAttempt, step: TapedStep, lost: str) -> _Own:
        """Tries what is proposed on this rank's own part of the step."""
        if proposal.kind == CureKind.LEFT_OUT:
            reason = "" if attempt.scaling is not None else "without a scaler, no rank leaves a step out"
            return _Own(Tried(why_not=reason, why_lost="it is left out"))
        cure = _cure(proposal, attempt, self._models)
        if cure is None or not self._may_last(attempt, cure):
            return _Own(Tried(why_not="what was proposed cannot be done"))
        cured = self._run(as_averaged(step), cure.change())
        if cured.reason:
            return _Own(Tried(why_not=cured.reason))
        lost = lost or _why_lost(proposal, cured)
        lost = lost or cured_step.why_not_handed_over(step, attempt.optimizer, self._models, averages=True)
        flat = None if lost else Averaging(cured.gradients)  # memory is taken before all begin
        signature = [] if lost else averaging.signature(cured.gradients)
        return _Own(Tried(gradients=signature, why_lost=lost), cure, cured, flat)

    def _done(self, agreed: Agreed, proposal: Proposal, own: _Own, group: Any) -> Agreed:
        decision = agreed.decision
        cured = own.cured if decision.is_averaged else None
        if cured is not None and own.flat is not None:
            cured = dataclasses.replace(cured, gradients=own.flat.over(group))
        return Agreed(decision, proposal, own.cure, cured)


def _cure(proposal: Proposal, attempt: StepAttempt, models: Models) -> LastingCure | None:
    text = json.dumps(proposal.detail)
    scaler = attempt.scaling.scaler if attempt.scaling is not None else None
    found = resumed.of_models(attempt.step, text, models) or resumed.of_scaler(attempt.step, text, scaler)
    return found[0] if found is not None else None


def _why_lost(proposal: Proposal, cured: CuredStep) -> str:
    """Why the replays' gradients, averaged, must not take the place of the step's own; empty where they may."""
    if proposal.kind == CureKind.LOSS_SCALE:
        return "it overflowed by its scale"
    if cured.hooked:
        return f"a function of the loop's own may change the gradient of {cured.hooked}, and a replay runs none"
    return averaging.why_not(cured.gradients)
