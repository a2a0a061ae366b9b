"""Causes in which nothing is left: rows that a mask empties, and targets without an alignment."""

from __future__ import annotations

import math

from ampscope.analysis.causes.cause_entry import NOTHING_MORE, CauseEntry, Match, Occurrence, OpRule, Turn
from ampscope.analysis.causes.mathematics import NegativeOperand
from ampscope.analysis.origin.op_facts import Executed
from ampscope.analysis.results import Remedy
from ampscope.trace.schema import Form
from ampscope.trace.vocabulary import Cause


def _masked_row(op: Executed) -> Match | None:
    if "softmax" not in op.name and "scaled_dot_product" not in op.name:
        return None
    masked = any(each.low == -math.inf for each in op.ranges)
    return Match(Cause.ALL_MASKED_SOFTMAX) if masked else None


def _masked_row_by_hand(op: Executed) -> Match | None:
    """A mask's -inf met another one, as in a softmax by hand over a row without a single key left: inf - inf."""
    differs = op.name in ("sub", "add", "rsub") and op.gives_nan
    masked = differs and any(each.low == -math.inf for each in op.ranges)
    return Match(Cause.ALL_MASKED_SOFTMAX) if masked else None


def _empty_row(occurrence: Occurrence) -> str:
    if "softmax" in occurrence.op or "scaled_dot_product" in occurrence.op or not occurrence.op:
        return "A row is masked with -inf from end to end, and the softmax of such a row is 0/0."
    return (
        f"A mask's -inf met another one in {occurrence.op_in_words}, and inf - inf is NaN: so it does in a softmax by "
        "hand over a row that is masked from end to end."
    )


def _ctc(op: Executed) -> Match | None:
    """Of finite log probabilities any alignment has a finite loss; one that is -inf may be on all of them."""
    if "ctc_loss" not in op.name:
        return None
    lowest = op.lowest_operand
    return Match(Cause.CTC_INFEASIBLE, NegativeOperand(lowest=lowest) if lowest == -math.inf else NOTHING_MORE)


def _no_alignment(occurrence: Occurrence) -> str:
    if isinstance(occurrence.reason, NegativeOperand):
        return (
            "Log probabilities of -inf were given: each alignment passes through one of them, or the target is longer "
            "than its input allows. So its loss is infinite."
        )
    return "No alignment exists: the target is longer than its input allows, so its loss is infinite."


# -- the entries ------------------------------------------------------------------------------------------------------

ENTRIES = (
    CauseEntry(
        cause=Cause.ALL_MASKED_SOFTMAX,
        noun="a softmax over a row that is masked entirely",
        sentence=_empty_row,
        remedies=(
            Remedy(
                text="Keep at least one key in every row, or zero the rows that have none.",
                code="empty = mask.all(-1, keepdim=True)\n"
                "w = logits.masked_fill(mask & ~empty, -torch.inf).softmax(-1)",
                kind=Form.KEPT_ROWS,
                untried="a replay tries it on torch's own softmax and attention, not on a softmax by hand",
            ),
        ),
        rules=(OpRule(Turn.MASKED_ROW, _masked_row), OpRule(Turn.MASKED_ROW, _masked_row_by_hand)),
    ),
    CauseEntry(
        cause=Cause.CTC_INFEASIBLE,
        noun="a CTC target that does not fit its input",
        sentence=_no_alignment,
        remedies=(
            Remedy(
                text="Leave out targets that are longer than their input allows, or set their loss to zero.",
                code="torch.nn.CTCLoss(zero_infinity=True)",
                kind=Form.ZERO_INFINITY,
                untried="a replay tries it on torch's own CTC loss",
            ),
        ),
        rules=(OpRule(Turn.KIND_OF_OP, _ctc),),
    ),
)
