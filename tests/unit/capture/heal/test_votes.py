"""What several ranks have proved comes to one decision, the same on each."""

from __future__ import annotations

import pytest

from ampscope.capture.heal.rank_agreement import OF_REDUCTION, Decision, Proposal, TriedProposal, decided, together

FINE, OF_SCALER = Proposal(is_fine=True), Proposal()
LEFT_OUT = Proposal(kind="left_out", text="left out")


def kept(*names: str) -> Proposal:
    return Proposal(kind="modules_fp32", detail={"kept": list(names)})


def bound(scale: float) -> Proposal:
    return Proposal(kind="loss_scale", detail={"bound": scale})


@pytest.mark.parametrize(
    ("proposals", "kind", "detail"),
    [
        ([kept("a"), FINE], "modules_fp32", {"kept": ["a"], "converted": [], "places": []}),
        ([FINE, kept("b", "a"), kept("a", "c")], "modules_fp32", {"kept": ["b", "a", "c"]}),
        ([bound(64.0), FINE, bound(16.0)], "loss_scale", {"bound": 16.0}),
        ([kept("a"), LEFT_OUT], "left_out", {}),
    ],
)
def test_what_is_tried_on_all(proposals: list[Proposal], kind: str, detail: dict[str, object]) -> None:
    found = together(proposals)
    assert found.kind == kind
    assert found.detail.items() >= detail.items()
    assert Proposal.read(found.written()) == found


@pytest.mark.parametrize(
    ("proposals", "why_not"),
    [
        ([FINE, FINE], OF_REDUCTION),
        ([kept("a"), Proposal(why_not="no cure was proved")], "on rank 1, no cure was proved"),
        ([kept("a"), OF_SCALER], ""),
        ([kept("a"), bound(4.0)], "what the ranks have proved cannot be done together"),
        ([FINE, Proposal(kind="loss_scale")], "what the ranks have proved cannot be done together"),
    ],
)
def test_where_nothing_is_tried(proposals: list[Proposal], why_not: str) -> None:
    assert together(proposals) == Proposal(why_not=why_not)


def test_a_cure_is_made_where_it_cures_on_every_rank() -> None:
    one, lost = [["weight", "(2,)", "torch.float32"]], "another set"
    assert decided([TriedProposal(gradients=one), TriedProposal(gradients=one)]) == Decision(
        is_made=True, is_averaged=True
    )
    assert decided([TriedProposal(gradients=one), TriedProposal(why_not="it is not finite")]) == Decision(
        why_not="on rank 1, it is not finite"
    )
    assert decided([TriedProposal(why_lost=lost), TriedProposal(gradients=one)]) == Decision(is_made=True, why_not=lost)
    other = decided([TriedProposal(gradients=one), TriedProposal(gradients=[])])
    assert (other.is_made, other.is_averaged) == (True, False)
    assert Decision.read(other.written()) == other
