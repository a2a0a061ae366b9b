"""In which order remedies are told, what they cost, and why one could not be tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Reason
from ampscope.analysis.causes.mathematics import DivisorSummed, TooFewValues
from ampscope.analysis.causes.overflow import LossGrew
from ampscope.analysis.cures import trials
from ampscope.analysis.cures.remedies import remedies, remedies_tried, why_untried
from ampscope.analysis.results import Cost, FormTried, Remedy, Tried
from ampscope.report.diagnosis_words import remedy_in_words
from ampscope.trace.schema import Change, Form, ReplayStatus, Trial
from ampscope.trace.vocabulary import Cause
from tests.support.primary import primary_incident

FINITE, NOT = Trial.FINITE, Trial.NONFINITE
MAX_OFF = FormTried(form=Form.MAX_OFF, call="exp", source=None, good_change=0.0)


def tried(change: Change, outcome: Trial = FINITE, *modules: str, **more: Any) -> Tried:
    return Tried(**{"step": 3, "change": change, "outcome": outcome, "modules": modules, "scale": 8.0, **more})


def form(name: Form, outcome: Trial = FINITE, *, good_change: float = 0.0, **more: Any) -> Tried:
    used = FormTried(form=name, call="square", source=None, value=0.5, was=0.25, good_change=good_change)
    return tried(Change.FORM, outcome, form=used, **more)


def told(*all_tried: Tried) -> list[tuple[str, bool | None]]:
    return [(each.kind, each.verified) for each in remedies_tried(Cause.FP16_OVERFLOW, all_tried)]


def test_the_smallest_change_that_cures_comes_first() -> None:
    everything = [
        tried(Change.FP32),
        tried(Change.BF16),
        tried(Change.SCALE, scale=4.0),
        tried(Change.CONVERSIONS, conversions=()),
        tried(Change.MODULES_FP32, FINITE, "a"),
        form(Form.CONSTANT, good_change=100.0),
        form(Form.SCALE_FIRST, NOT),
        form(Form.IN_FLOAT32),
    ]
    assert told(*everything) == [
        *(("in_float32", True), ("modules_fp32", True), ("conversions", True), ("scale", True), ("bf16", True)),
        *(("constant", True), ("scale_first", False)),
    ]


def test_of_one_form_at_several_scales_the_smallest_change_is_told() -> None:
    other = tried(Change.FP32, NOT)
    at = [form(Form.CONSTANT, scale=scale) for scale in (1.0, 4.0, 2.0)]
    (alone, *_) = found = [each for each in remedies_tried(Cause.FP16_OVERFLOW, [other, *at]) if each.verified]
    assert len(found) == 1
    assert alone.text.endswith("and a loss scale of 4 (2²).")
    without = remedies_tried(Cause.FP16_OVERFLOW, [other, *at, form(Form.CONSTANT)])
    assert [each.text for each in without if each.verified] == [alone.text.replace(", and a loss scale of 4 (2²)", "")]


def test_a_form_that_failed_once_has_not_cured() -> None:
    assert told(form(Form.IN_FLOAT32), form(Form.IN_FLOAT32, NOT, step=4)) == [("in_float32", False)]


def test_more_modules_are_the_second_choice_and_it_says_why() -> None:
    because = "b is within a factor of 1.6 of overflow in the same step"
    few, more = tried(Change.MODULES_FP32, FINITE, "a"), tried(Change.MODULES_FP32, FINITE, "a", "b", reason=because)
    assert [each.text for each in remedies_tried(Cause.FP16_OVERFLOW, [more, few])] == [
        "Keep a in float32.",
        f"Keep a and b in float32: {because}.",
    ]


def test_a_cost_is_that_of_the_replay_in_which_it_was_measured() -> None:
    rows = [form(Form.IN_FLOAT32, extra_bytes=512), form(Form.IN_FLOAT32, step=4, extra_bytes=640, extra_time=0.25)]
    (remedy,) = remedies_tried(Cause.FP16_OVERFLOW, rows)
    assert remedy.cost == Cost(time=0.25, bytes=512)


@pytest.mark.parametrize(
    ("remedy", "words"),
    [
        (Remedy(text="", verified=True), "tried on this step: cures it"),
        (
            Remedy(text="", verified=True, cost=Cost(time=0.004, bytes=3 << 20)),
            "tried on this step: cures it; +0.4 % of the step, +3 MiB",
        ),
        (
            Remedy(text="", verified=True, cost=Cost(time=0.0, bytes=-64), changes_good_values=True),
            "tried on this step: cures it; changes values that were good; no measurable time",
        ),
        (Remedy(text="", verified=True, cost=Cost(time=None, bytes=0)), "tried on this step: cures it"),
        (
            Remedy(text="", verified=False, cost=Cost(time=1.0, bytes=1)),
            "tried on this step: does not cure it",
        ),
        (Remedy(text="", untried="no room"), "not tried: no room"),
    ],
)
def test_what_is_known_of_a_remedy_in_words(remedy: Remedy, words: str) -> None:
    assert remedy_in_words(remedy) == words


def test_a_remedy_that_was_not_tried_cannot_but_say_why() -> None:
    with pytest.raises(ValueError, match=r"does not say why: Mend it\."):
        Remedy(text="Mend it.")
    assert replace(Remedy(text="", untried="no room"), verified=True).untried == ""


def test_the_words_tell_on_how_many_steps_a_cure_has_helped(run_folder: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, backoff_factor=0.9)
    with ampscope.watch(model, scaler, dir=run_folder, quiet=True):
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = (model(torch.randn(4, 8)) * 0 + 300).square().float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    incident = primary_incident(ampscope.open_run(run_folder))
    assert "finite with square alone in float32 (on 2 later steps too)" in trials.in_words(incident)
    assert incident.remedies[0].kind == Form.IN_FLOAT32
    assert incident.remedies[0].cost is not None
    assert why_untried(incident) == ""
    lost = replace(incident, replay=ReplayStatus.UNAVAILABLE, replay_reason="the tape was full")
    assert why_untried(lost) == "the tape was full"
    missed = replace(incident, tried=(*incident.tried, tried(Change.BF16, Trial.UNAVAILABLE, reason="no room")))
    assert why_untried(missed) == "no room"


def test_where_no_smaller_step_of_the_optimizer_was_tried_it_says_when_one_is() -> None:
    advice = remedies(Cause.DIVERGENCE, reason=LossGrew(usual=1.0, last=1e9))
    assert [each.kind for each in advice] == ["smaller_step", "clipped"]
    why = "it is tried before the weights move, on a step whose loss is ten times what it was; none was seen"
    assert {each.untried for each in advice} == {why}


def test_what_changes_good_values_comes_after_all_else_that_cured() -> None:
    bound = form(Form.OPERAND_BOUND, good_change=1e3)
    assert [kind for kind, _ in told(bound, tried(Change.FP32))] == [Change.FP32, Form.OPERAND_BOUND]
    assert next(kind for kind, _ in told(form(Form.OPERAND_BOUND), tried(Change.FP32))) == Form.OPERAND_BOUND


def test_a_number_beside_the_sum_makes_another_quotient_of_it() -> None:
    exact, beside = (
        remedies_tried(Cause.FP16_OVERFLOW, [tried(Change.FORM, form=each)])[0]
        for each in (MAX_OFF, replace(MAX_OFF, was=1e-3))
    )
    assert exact.text.endswith("the results are the same.")
    assert exact.changes_good_values is False
    assert "except where the 0.001 added to a small sum" in beside.text
    assert beside.changes_good_values is None
    (changed,) = remedies_tried(
        Cause.FP16_OVERFLOW, [tried(Change.FORM, form=replace(MAX_OFF, was=1e-3, good_change=90.0))]
    )
    assert changed.changes_good_values is True


@pytest.mark.parametrize(
    ("op", "reason", "texts"),
    [
        ("aten.div.Tensor", NOTHING_MORE, ["Bound the divisor"]),
        ("aten.div.Tensor", DivisorSummed(), ["Bound the divisor", "Leave out what is empty"]),
        ("aten.pow.Tensor_Scalar", NOTHING_MORE, ["Keep the operand of pow away from zero"]),
        ("aten.rsqrt.default", NOTHING_MORE, ["Keep the operand of rsqrt away from zero"]),
        ("aten.std.correction", TooFewValues(of="too few values"), ["Leave out what is empty"]),
    ],
)
def test_no_divisor_is_bounded_where_there_is_none(op: str, reason: Reason, texts: list[str]) -> None:
    advice = remedies(Cause.DIV_ZERO, op=op, reason=reason)
    assert [each.text[: len(text)] for each, text in zip(advice, texts, strict=True)] == texts


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("matmul", "torch.matmul(a.float(), b.float())"),
        ("einsum", "torch.einsum(equation, a.float(), b.float())"),
        ("linear", "F.linear(x.float(), weight.float(), bias.float())"),
        ("mse_loss", "F.mse_loss(x.float(), target)"),
        ("sum", "torch.sum(x.float())  # its other arguments as they are"),
    ],
)
def test_the_general_code_of_a_call_in_float32_is_a_call(call: str, code: str) -> None:
    used = FormTried(form=Form.IN_FLOAT32, call=call, source=None)
    (remedy,) = remedies_tried(Cause.FP16_OVERFLOW, [tried(Change.FORM, form=used)])
    assert remedy.code.splitlines()[1] == f"    y = {code}"
