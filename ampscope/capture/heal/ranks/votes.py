"""Messages of the ranks about a bad step, and what they come to; the same on all, and without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
class Tried:
    """The outcome of a rank's own part of the step with what was proposed."""

    why_not: str = ""  #: why it is of no use here; empty where it is
    gradients: list[list[str]] = field(default_factory=list)  #: that it could give to an average; see `averaging`
    why_lost: str = ""  #: why the step itself cannot be saved; empty where it can

    def written(self) -> str:
        """Writes the outcome as JSON, for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Tried:
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


def decided(tried: Sequence[Tried]) -> Decision:
    """Decides for all ranks, by what each has tried."""
    for rank, each in enumerate(tried):
        if each.why_not:
            return Decision(why_not=f"on rank {rank}, {each.why_not}")
    lost = next((each.why_lost for each in tried if each.why_lost), "")
    if not lost and any(each.gradients != tried[0].gradients for each in tried):
        lost = "not the same parameters have gradients on all ranks"
    return Decision(is_made=True, is_averaged=not lost, why_not=lost)
