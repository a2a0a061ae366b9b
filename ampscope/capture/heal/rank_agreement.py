"""The ranks of a job come to one decision on a step that went bad on all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.events import StepAttempt
from ampscope.capture.heal import cured_step, in_force
from ampscope.capture.heal.cured_step import CuredStep
from ampscope.capture.heal.lasting_cure import LastingCure
from ampscope.capture.tape.tape_entry import UnscaledGradients
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support import own_collectives
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.own_collectives import Averaging
from ampscope.capture.torch_support.process_group import Ballot
from ampscope.trace.schema import CureKind

#: Why nothing can be done where no rank's own part of the step was bad.
OF_REDUCTION = "each rank's own part of the step was finite, and what the ranks made of it together was not"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The cure that a rank has proved on its own part of a step, or why it has none."""

    is_fine: bool = False  #: its own part was finite: what is bad came from others
    kind: str = ""  #: of the cure; empty where it has none
    text: str = ""  #: what is done, as a clause
    detail: dict[str, Any] = field(default_factory=dict)  #: what it takes to make the cure
    why_not: str = ""  #: why it has none, in words; empty where a scaler is to do what scalers do

    def written(self) -> str:
        """Writes the proposal as JSON, for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Proposal:
        """Reads the proposal that another rank has written."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedProposal:
    """The outcome of a rank's own part of the step with what was proposed."""

    why_not: str = ""  #: why it is of no use here; empty where it is
    gradients: list[list[str]] = field(default_factory=list)  #: that it could give to an average; see `own_collectives`
    why_lost: str = ""  #: why the step itself cannot be saved; empty where it can

    def written(self) -> str:
        """Writes the outcome as JSON, for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> TriedProposal:
        """Reads the outcome that another rank has written."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision that holds for all ranks."""

    is_made: bool = False  #: the cure
    is_averaged: bool = False  #: and the gradients of all replays are averaged for the step itself
    why_not: str = ""  #: one of them is not done, in words
    is_last: bool = False  #: there is none after it

    def written(self) -> str:
        """Writes the decision as JSON, for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Decision:
        """Reads the decision that was written."""
        return cls(**json.loads(text))


def together(proposals: Sequence[Proposal]) -> Proposal:
    """Combines what each rank has proved into one proposal for all, or into the reason why there is none."""
    if any(not (each.is_fine or each.kind or each.why_not) for each in proposals):
        return Proposal()
    without = next((rank for rank, each in enumerate(proposals) if each.why_not), None)
    if without is not None:
        return Proposal(why_not=f"on rank {without}, {proposals[without].why_not}")
    found = [each for each in proposals if not each.is_fine]
    left_out = next((each for each in found if each.kind == CureKind.LEFT_OUT), None)
    if left_out is not None or not found:
        return left_out or Proposal(why_not=OF_REDUCTION)
    bounds = [float(each.detail["bound"]) for each in found if "bound" in each.detail]
    if len(bounds) == len(found):
        return Proposal(kind=CureKind.LOSS_SCALE, detail={"bound": min(bounds)})
    if bounds or not all({"kept", "converted"} & each.detail.keys() for each in found):
        return Proposal(why_not="what the ranks have proved cannot be done together")
    return Proposal(kind=found[0].kind, detail=_of_modules(found))


def _of_modules(found: Sequence[Proposal]) -> dict[str, Any]:
    """All the modules, in the order in which ranks name them."""
    names = ("kept", "converted", "places")
    return {name: list(dict.fromkeys(each for one in found for each in one.detail.get(name, ()))) for name in names}


def decided(tried: Sequence[TriedProposal]) -> Decision:
    """Decides for all ranks, by what each has tried."""
    for rank, each in enumerate(tried):
        if each.why_not:
            return Decision(why_not=f"on rank {rank}, {each.why_not}")
    lost = next((each.why_lost for each in tried if each.why_lost), "")
    if not lost and any(each.gradients != tried[0].gradients for each in tried):
        lost = "not the same parameters have gradients on all ranks"
    return Decision(is_made=True, is_averaged=not lost, why_not=lost)


class FromGradients(ReplayChange):
    """A replay that begins after the last backward, with these gradients.

    Args:
        gradients: By parameter.
    """

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._gradients = gradients

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        for module in models.modules:
            for leaf, parameter in module._parameters.items():
                gradient = self._gradients.get(".".join(filter(None, (models.names[id(module)], leaf))))
                if parameter is not None and gradient is not None:
                    parameter.grad = gradient.clone()


def as_averaged(step: TapedStep) -> TapedStep:
    """The step to its last backward: what the loop did after that, it did to the average."""
    return step._replace(edits=(), given=MappingProxyType({}), edited=False) if step.edited else step


def edited(step: TapedStep, averaged: CuredStep, run: Callable[[TapedStep, ReplayChange], CuredStep]) -> CuredStep:
    """An averaged step with what the loop did to its gradients; itself where that was no more than unscaling.

    Args:
        step: With what the loop did.
        averaged: The step as it came out of the replays, with the average of all.
        run: Runs a step with a change.
    """
    edits = (step.tape[number] for number in step.edits)
    if not step.given and all(isinstance(entry.arguments, UnscaledGradients) for entry in edits):
        return averaged  # the scale comes off as they are handed over
    rest = run(step._replace(since=step.gradients_at + 1), FromGradients(averaged.gradients))
    return dataclasses.replace(rest, buffers=averaged.buffers, hooked=averaged.hooked)


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

    tried: TriedProposal
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
        return self._done(
            self._settled(question, decided([TriedProposal.read(each) for each in tried])), proposal, own, group
        )

    def all_may(self, question: str, why_not: str) -> str:
        """Whether every rank can make a step with the gradients of all: no rank makes it that another one does not.

        Args:
            question: See `reach`; its decision was to average.
            why_not: Why this rank cannot; empty where it can.

        Returns:
            Why no rank does; empty where all do.
        """
        question = f"{question}-made"
        votes = self._ballot.votes(f"{question}/may", TriedProposal(why_lost=why_not).written())
        own = decided([TriedProposal.read(vote) for vote in votes]) if votes else Decision(why_not=_IN_TIME)
        decision = self._settled(question, own).decision
        return "" if decision.is_averaged else decision.why_not

    def _settled(self, question: str, decision: Decision) -> Agreed:
        return Agreed(Decision.read(self._ballot.settled(question, decision.written())), Proposal())

    def _own(self, proposal: Proposal, attempt: StepAttempt, step: TapedStep, lost: str) -> _Own:
        """Tries what is proposed on this rank's own part of the step."""
        if proposal.kind == CureKind.LEFT_OUT:
            reason = "" if attempt.scaling is not None else "without a scaler, no rank leaves a step out"
            return _Own(TriedProposal(why_not=reason, why_lost="it is left out"))
        cure = _proposed_cure(proposal, attempt, self._models)
        if cure is None or not self._may_last(attempt, cure):
            return _Own(TriedProposal(why_not="what was proposed cannot be done"))
        cured = self._run(as_averaged(step), cure.change())
        if cured.reason:
            return _Own(TriedProposal(why_not=cured.reason))
        lost = lost or _why_lost(proposal, cured)
        lost = lost or cured_step.why_not_handed_over(step, attempt.optimizer, self._models, averages=True)
        flat = None if lost else Averaging(cured.gradients)  # memory is taken before all begin
        signature = [] if lost else own_collectives.gradient_signature(cured.gradients)
        return _Own(TriedProposal(gradients=signature, why_lost=lost), cure, cured, flat)

    def _done(self, agreed: Agreed, proposal: Proposal, own: _Own, group: Any) -> Agreed:
        decision = agreed.decision
        cured = own.cured if decision.is_averaged else None
        if cured is not None and own.flat is not None:
            cured = dataclasses.replace(cured, gradients=own.flat.over(group))
        return Agreed(decision, proposal, own.cure, cured)


def _proposed_cure(proposal: Proposal, attempt: StepAttempt, models: Models) -> LastingCure | None:
    text = json.dumps(proposal.detail)
    scaler = attempt.scaling.scaler if attempt.scaling is not None else None
    found = in_force.resumed_of_models(attempt.step, text, models) or in_force.resumed_of_scaler(
        attempt.step, text, scaler
    )
    return found[0] if found is not None else None


def _why_lost(proposal: Proposal, cured: CuredStep) -> str:
    """Why the replays' gradients, averaged, must not take the place of the step's own; empty where they may."""
    if proposal.kind == CureKind.LOSS_SCALE:
        return "it overflowed by its scale"
    if cured.hooked:
        return f"a function of the loop's own may change the gradient of {cured.hooked}, and a replay runs none"
    return own_collectives.why_not_averaged(cured.gradients)
