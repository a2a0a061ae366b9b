"""Every cause has its entry, and every entry is whole."""

from __future__ import annotations

import math
import string
from pathlib import Path

import pytest
import torch

import ampscope
from ampscope.analysis.causes import usage
from ampscope.analysis.causes.catalogue import CATALOGUE, FAMILIES, OP_RULES, cause_in_words, explanation
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, CauseEntry, Occurrence, Reason, Turn
from ampscope.analysis.causes.mathematics import NegativeOperand, TooFewValues
from ampscope.analysis.causes.outside import CameIn, ChangedSince, FromOthers
from ampscope.analysis.causes.overflow import Literal, LossGrew, Overflowed
from ampscope.analysis.causes.underflow import ConstantLost, Flushed, GradientFlushed, UpdatesLost
from ampscope.analysis.causes.unknown import Observed
from ampscope.analysis.causes.usage import (
    HalfState,
    LearningRateMoved,
    MistakeSeen,
    ScaleForgotten,
    UsageEntry,
    filled_in,
)
from ampscope.analysis.causes.usage_forms import FORMS
from ampscope.trace.evidence import FindingEvidence
from ampscope.trace.vocabulary import MISTAKES_IN_WORDS, Cause, MistakeForm, Severity

PACKAGE = Path(ampscope.__file__).parent
BMM = "aten.bmm.default"


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_known_whole(cause: Cause) -> None:
    assert cause in CATALOGUE, f"{cause.name} needs a CauseEntry in one of the families of ampscope/analysis/causes"
    entry = CATALOGUE[cause]
    assert entry.cause is cause
    assert _is_noun_phrase(cause_in_words(cause))
    assert _is_sentence(explanation(cause, Occurrence(op=BMM)))
    assert isinstance(entry.severity, Severity)
    assert (entry.severity is Severity.INFO) == cause.is_benign
    advice = entry.advice(Occurrence(op=BMM, module="attn"))
    assert bool(advice) != (cause.is_benign or cause is Cause.UNKNOWN)
    assert all(_is_sentence(remedy.text) for remedy in advice)
    assert entry.rules or _names(entry.recognised_in, cause)


def _is_noun_phrase(text: str) -> bool:
    return bool(text) and text.split(maxsplit=1)[0] not in ("A", "An", "The") and text[-1] not in string.punctuation


def _is_sentence(text: str) -> bool:
    return bool(text) and text.endswith(".") and "{" not in text and "None" not in text


def _names(place: str, cause: Cause) -> bool:
    """Whether the code of a module, or of a room, names the cause."""
    path = PACKAGE / place.replace(".", "/")
    module = path.with_suffix(".py")
    files = [module] if module.exists() else list(path.rglob("*.py"))
    return bool(place) and any(f"Cause.{cause.name}" in file.read_text("utf-8") for file in files)


def test_what_is_missing_is_noticed() -> None:
    assert not _names("", Cause.LOG_ZERO)
    assert not _names("analysis.scale.scaler_course", Cause.LOG_ZERO)
    assert not _is_sentence("The constant None does not fit.")


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.cause)
def test_a_text_names_nothing_but_the_op(entry: CauseEntry) -> None:
    if isinstance(entry.sentence, str):
        assert {name for _, name, _, _ in string.Formatter().parse(entry.sentence)} <= {None, "op"}


def test_each_cause_is_in_one_family() -> None:
    causes = [entry.cause for family in FAMILIES for entry in family.ENTRIES]
    assert len(causes) == len(set(causes))


# -- the order of the rules -------------------------------------------------------------------------------------------


def test_rules_are_asked_in_their_turns() -> None:
    assert [rule.turn for rule in OP_RULES] == sorted(rule.turn for rule in OP_RULES)
    assert {rule.turn for rule in OP_RULES} == set(Turn)


# -- usage mistakes ---------------------------------------------------------------------------------------------------


def test_a_usage_mistake_says_what_a_correct_loop_does() -> None:
    mistakes = {cause for cause in Cause if cause.is_usage or cause in MISTAKES_IN_WORDS}
    assert {entry.cause for entry in usage.ENTRIES} == mistakes
    for entry in usage.ENTRIES:
        assert isinstance(entry, UsageEntry)
        assert entry.correct
        assert not entry.correct.endswith(".")
        assert entry.noun == MISTAKES_IN_WORDS[entry.cause]


@pytest.mark.parametrize("form", MistakeForm)
def test_a_form_is_known(form: MistakeForm) -> None:
    sentence = FORMS[form].sentence
    assert not sentence or _is_sentence(filled_in(sentence, NOTHING_MORE))


# -- the sentences, word for word -------------------------------------------------------------------------------------

SENTENCES: list[tuple[Cause, Reason, str]] = [
    (
        Cause.FP16_OVERFLOW,
        Overflowed(dtype="float16", largest=300.0),
        "The result of bmm is too large for float16, which ends at 65,504; its operands went up to 300.",
    ),
    (
        Cause.FP16_OVERFLOW,
        Overflowed(dtype="float16", largest=None),
        "The result of bmm is too large for float16, which ends at 65,504.",
    ),
    (
        Cause.FP16_UNDERFLOW,
        GradientFlushed(parameter="head.weight"),
        "The gradient that bmm gives is below float16's smallest number and becomes 0; head.weight gets none at all.",
    ),
    (
        Cause.FP16_UNDERFLOW,
        Flushed(dtype="float16", by="aten.mul.Tensor", lost_by=3),
        "A value that bmm needs was rounded to zero in float16 before, by mul.",
    ),
    (
        Cause.EPS_UNDERFLOW,
        ConstantLost(value=1e-8, becomes=0.0, dtype="float16", lost_by=3),
        "The constant 1e-8 that should keep the operand of bmm safe becomes 0 in float16.",
    ),
    (
        Cause.EPS_UNDERFLOW,
        ConstantLost(value=1 - 1e-7, becomes=1.0, dtype="float16", lost_by=3),
        "The constant 0.9999999 that should keep the operand of bmm safe becomes 1 in float16.",
    ),
    (Cause.LITERAL_OVERFLOW, Literal(value=-1e9, dtype="float16"), "The constant -1e9 does not fit float16."),
    (
        Cause.BF16_PRECISION,
        UpdatesLost(dtype="bfloat16", share=0.954),
        "95% of the weights did not move in the optimizer's step: their updates are too small for bfloat16.",
    ),
    (
        Cause.HALF_PARAMS,
        UpdatesLost(dtype="float16", share=1.0),
        "100% of the weights did not move in the optimizer's step: their updates are too small for float16.",
    ),
    (
        Cause.HALF_PARAMS,
        HalfState(dtype="bfloat16"),
        "The optimizer computes in bfloat16, and bmm made a number that is not finite in it.",
    ),
    (
        Cause.LOG_ZERO,
        NegativeOperand(lowest=-0.25),
        "bmm was given a negative number (-0.25), which has no logarithm.",
    ),
    (
        Cause.LOG_ZERO,
        Flushed(dtype="float16", by="aten._softmax.default", lost_by=3),
        "bmm took the logarithm of exactly 0, which is -inf: softmax had rounded a small number to 0 in float16.",
    ),
    (Cause.LOG_ZERO, Reason(), "bmm took the logarithm of exactly 0, which is -inf."),
    (Cause.DIV_ZERO, TooFewValues(of="no target at all"), "bmm was taken over no target at all."),
    (Cause.SQRT_NEGATIVE, NegativeOperand(lowest=-1e-7), "bmm was given a negative number (-1e-7)."),
    (
        Cause.BAD_INPUT,
        CameIn(name="args[0]", rows=(1, 3)),
        "args[0] held non-finite values before the model touched it, at index 1, 3 of its first dimension.",
    ),
    (Cause.BAD_INPUT, CameIn(name="args[0]"), "args[0] held non-finite values before the model touched it."),
    (
        Cause.BAD_WEIGHT,
        CameIn(name="w"),
        (
            "The parameter w was not finite when the step first read it, and no op of the step that was seen had "
            "written it."
        ),
    ),
    (
        Cause.BAD_BUFFER,
        CameIn(name="b", at_start=True),
        (
            "The buffer b was not finite when the step first read it, and no step came before: it was created or "
            "loaded so, or written by code that was not seen."
        ),
    ),
    (
        Cause.DIVERGENCE,
        Overflowed(dtype="bfloat16", largest=1e30),
        "The result of bmm is too large for bfloat16, which ends at 3.39e38; its operands went up to 1e30.",
    ),
    (
        Cause.DIVERGENCE,
        Overflowed(dtype="float64", largest=torch.finfo(torch.float32).max),  # where recorded magnitudes end
        (
            "The result of bmm is too large for float64, which ends at 1.798e308; its operands went up to "
            "3.403e38 or more."
        ),
    ),
    (
        Cause.DIVERGENCE,
        LossGrew(usual=0.5, last=3e8),
        ("The loss had grown from about 0.5 to 3e8 in the steps before, until the values no longer fit their dtype."),
    ),
    (
        Cause.RECEIVED,
        FromOthers(ranks=2, sender=None, sums=True, dtype="float16"),
        (
            "What this rank gave into bmm was finite, and what it got back was not: it came from another of the 2 "
            "ranks, or what they put together left the range of float16."
        ),
    ),
    (
        Cause.RECEIVED,
        FromOthers(ranks=4, sender=3, sums=False, dtype="float32"),
        "What this rank gave into bmm was finite, and what it got back was not: it came from rank 3.",
    ),
    (
        Cause.HARDWARE_TRANSIENT,
        ChangedSince(written_by="aten.bmm.default", seen_in="aten.relu.default"),
        "What bmm gave was finite, yet relu read a non-finite value there: something outside torch changed it.",
    ),
    (Cause.UNKNOWN, Observed(sentence="The rows were lost."), "The rows were lost."),
    (
        Cause.MISUSE_SCHEDULER_ORDER,
        LearningRateMoved(steps=1, of=8, matters=True),
        (
            "The learning rate moved on once although the optimizer step before had been skipped: the schedule is "
            "1 of 8 steps ahead of the training."
        ),
    ),
    (
        Cause.MISUSE_SCALER_STATE_NOT_RESTORED,
        ScaleForgotten(was=1024.0, starts=65536.0),
        (
            "A new scaler took over without the old one's state: it starts at 65,536 (2¹⁶) where the run had come "
            "to 1,024 (2¹⁰), and has to find its place a second time."
        ),
    ),
    (
        Cause.MISUSE_SCALER_STATE_NOT_RESTORED,
        MistakeSeen(seen=FindingEvidence(optimizer_steps=5000)),
        (
            "The optimizer was restored after 5,000 steps, but the scaler starts afresh and loses steps to calibrate "
            "a second time."
        ),
    ),
]


@pytest.mark.parametrize(("cause", "reason", "text"), SENTENCES)
def test_a_reason_is_said_in_a_sentence(cause: Cause, reason: Reason, text: str) -> None:
    assert explanation(cause, Occurrence(op=BMM, reason=reason)) == text


@pytest.mark.parametrize(("op", "says"), [("aten._softmax.default", "the softmax of such a row"), (BMM, "met another")])
def test_a_row_without_keys_is_told_as_it_was_seen(op: str, says: str) -> None:
    assert says in explanation(Cause.ALL_MASKED_SOFTMAX, Occurrence(op=op))


def test_an_alignment_of_probability_zero_is_not_called_too_long() -> None:
    reason = NegativeOperand(lowest=-math.inf)
    assert "each alignment passes through one" in explanation(Cause.CTC_INFEASIBLE, Occurrence(reason=reason))
    assert "No alignment exists" in explanation(Cause.CTC_INFEASIBLE, Occurrence())


# -- advice that fits what was seen -----------------------------------------------------------------------------------


def _advice(cause: Cause, reason: Reason) -> str:
    advice = CATALOGUE[cause].advice(Occurrence(op=BMM, module="attn", reason=reason))
    return " ".join(f"{remedy.text} {remedy.code}" for remedy in advice)


def test_a_smaller_learning_rate_is_advised_where_the_loss_was_seen_to_grow() -> None:
    assert "learning rate" in _advice(Cause.DIVERGENCE, LossGrew(usual=0.5, last=3e8))
    assert "learning rate" not in _advice(Cause.DIVERGENCE, Overflowed(dtype="float32", largest=100.0))
    assert "learning rate" not in _advice(Cause.DIVERGENCE, Reason())


@pytest.mark.parametrize("at_start", [True, False])
def test_advice_on_state_fits_what_it_is(at_start: bool) -> None:
    of_weight = _advice(Cause.BAD_WEIGHT, CameIn(name="net.w", at_start=at_start))
    of_buffer = _advice(Cause.BAD_BUFFER, CameIn(name="net.mean", at_start=at_start))
    assert "copy_" not in of_weight
    assert "named_parameters" in of_weight
    assert "self.mean.copy_(value)" in of_buffer
    assert ("checkpoint" in of_weight, "checkpoint" in of_buffer) == (not at_start, not at_start)


def test_a_cast_begins_a_sentence_with_a_capital() -> None:
    assert explanation(Cause.LOG_ZERO, Occurrence(op="aten._to_copy.default")).startswith("A cast took")
