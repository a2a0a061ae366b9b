"""What was tried, in words and as remedies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampscope.analysis.cures import explicit_half, remedies, trials
from ampscope.analysis.cures.explicit_half import ExplicitHalf, HalfWeights
from ampscope.analysis.results import CodeLine, Tried
from ampscope.trace.schema import LOSS_CODE, Change, Trial
from ampscope.trace.vocabulary import Cause


def tried(
    change: Change,
    outcome: Trial,
    *modules: str,
    scale: float | None = None,
    conversions: tuple[CodeLine, ...] | None = None,
) -> Tried:
    return Tried(step=3, change=change, outcome=outcome, modules=modules, scale=scale, conversions=conversions)


#: Where the line goes.
ONCE = "  # once, before the training loop"
FP32 = tried(Change.FP32, Trial.FINITE)
ALONE_FAILS = tried(Change.MODULES_FP32, Trial.NONFINITE, "attn")
TOGETHER = tried(Change.MODULES_FP32, Trial.FINITE, "attn", "head")


def told(*all_tried: Tried, cause: Cause = Cause.FP16_OVERFLOW) -> list[tuple[str, bool | None]]:
    return [(remedy.text, remedy.verified) for remedy in remedies.remedies_tried(cause, all_tried)]


def test_what_cures_comes_first_and_what_did_not_is_said_after_it() -> None:
    assert told(FP32, ALONE_FAILS, TOGETHER) == [
        ("Keep attn and head in float32.", True),
        ("Keep attn alone in float32.", False),
    ]


@pytest.mark.parametrize(
    ("modules", "code"),
    [
        (("a", "b.0"), f'ampscope.keep_fp32(model, ["a", "b.0"]){ONCE}'),
        (
            ("Net[0].a", "Gen[1].b"),
            f'ampscope.keep_fp32(models[0], ["a"]){ONCE}\nampscope.keep_fp32(models[1], ["b"]){ONCE}',
        ),
        (("Net[0]",), f'ampscope.keep_fp32(models[0], [""]){ONCE}'),
    ],
    ids=["modules", "several models", "one of several"],
)
def test_the_code_names_modules_as_keep_fp32_does(modules: tuple[str, ...], code: str) -> None:
    (remedy,) = remedies.remedies_tried(Cause.FP16_OVERFLOW, [tried(Change.MODULES_FP32, Trial.FINITE, *modules)])
    assert remedy.code == code


def test_the_whole_model_in_float32_is_the_last_of_what_helps() -> None:
    everything, bf16 = tried(Change.MODULES_FP32, Trial.FINITE, ""), tried(Change.BF16, Trial.FINITE)
    first, last = remedies.remedies_tried(Cause.LOG_ZERO, [FP32, everything, bf16])
    assert (first.verified, last.verified) == (True, True)
    assert "bfloat16" in first.text
    assert last.text == "Compute in float32: leave autocast out."
    assert "keep_fp32" not in last.code


def test_loss_code_is_switched_off_by_hand() -> None:
    (remedy,) = remedies.remedies_tried(Cause.LOG_ZERO, [tried(Change.MODULES_FP32, Trial.FINITE, LOSS_CODE)])
    assert remedy.text == "Keep the loss code in float32."
    assert "keep_fp32" not in remedy.code
    assert "enabled=False" in remedy.code


LINE = CodeLine("net.py", 8, "y = x.half().exp()")
BY_ITSELF = ExplicitHalf(conversions=(LINE,), from_conversion=True)


@pytest.mark.parametrize("explicit", [BY_ITSELF, ExplicitHalf()], ids=["read off the step", "recorded"])
def test_a_remedy_says_what_else_its_replay_changed(explicit: ExplicitHalf) -> None:
    recorded = None if explicit.conversions else (LINE,)
    everything = [tried(change, Trial.FINITE, conversions=recorded) for change in (Change.BF16, Change.FP32)]
    bf16, fp32 = remedies.remedies_tried(Cause.FP16_OVERFLOW, everything, explicit)
    for remedy, code in ((bf16, "y = x.bfloat16().exp()  # net.py:8"), (fp32, "y = x.float().exp()  # net.py:8")):
        assert remedy.verified
        assert remedy.text.startswith("Take out the conversion to half precision at net.py:8")
        assert remedy.code.endswith(code)


def test_loss_code_in_float32_does_not_take_its_conversions_out() -> None:
    loss = tried(Change.MODULES_FP32, Trial.FINITE, LOSS_CODE, conversions=(LINE,))
    (remedy,) = remedies.remedies_tried(Cause.FP16_OVERFLOW, [loss])
    assert remedy.text.endswith("at net.py:8 (or convert to float32), and keep the loss code in float32.")


def test_modules_with_half_parameters_are_widened_before_they_are_kept() -> None:
    explicit = ExplicitHalf(weights=HalfWeights(("a.w", "b.w")))
    (remedy,) = remedies.remedies_tried(Cause.FP16_OVERFLOW, [tried(Change.MODULES_FP32, Trial.FINITE, "a")], explicit)
    assert remedy.code == f'model.float()\nampscope.keep_fp32(model, ["a"]){ONCE}'
    assert "a.w" in remedy.text
    assert "b.w" not in remedy.text


def test_many_conversions_are_counted() -> None:
    lines = [CodeLine("net.py", number, "x.to(dtype=torch.float16)") for number in range(5)]
    assert explicit_half.places(lines).endswith(
        "conversions to half precision at net.py:0, net.py:1, net.py:2 and 2 more"
    )
    assert explicit_half.rewritten(lines[:1], "bfloat16") == "x.to(dtype=torch.bfloat16)  # net.py:0"
    assert explicit_half.rewritten([CodeLine("net.py", 9, "x.type_as(y)")], "float32") == ""


@pytest.mark.parametrize(
    "line", [CodeLine("net.py\nstolen()", 9, "x.half()"), CodeLine("n.py", 9, "x.half()\u2028stolen()")]
)
def test_code_to_paste_is_one_line_a_line(line: CodeLine) -> None:
    assert explicit_half.rewritten([line], "float32") == ""


def test_the_scale_has_its_number() -> None:
    scales = [tried(Change.SCALE, Trial.FINITE, scale=1.0), tried(Change.SCALE, Trial.FINITE, scale=4096.0)]
    (first, *_) = remedies.remedies_tried(Cause.SCALE_OVERFLOW, scales)
    assert "4,096 (2¹²)" in first.text
    assert first.code == "scaler = torch.amp.GradScaler(init_scale=4096.0)"
    assert told(tried(Change.SCALE, Trial.NONFINITE, scale=1.0)) == [
        ("Lower the loss scale: even a scale of 1 does not help.", False)
    ]


def test_more_precision_in_vain_is_said() -> None:
    assert told(tried(Change.FP32, Trial.NONFINITE), cause=Cause.LOG_ZERO) == [
        ("More precision: float32 everywhere.", False)
    ]


@pytest.mark.parametrize("cause", [Cause.BENIGN_INF_MASK, Cause.DIVERGENCE, Cause.HARDWARE_TRANSIENT])
def test_a_finite_step_proves_nothing_where_precision_has_no_part(cause: Cause) -> None:
    assert told(FP32, TOGETHER, cause=cause) == []


@pytest.mark.parametrize("outcome", [Trial.FINITE, Trial.NONFINITE])
def test_a_fault_that_did_not_come_again_is_cured_by_the_step_itself(outcome: Trial) -> None:
    ((text, verified),) = told(tried(Change.NONE, outcome), cause=Cause.HARDWARE_TRANSIENT)
    assert text.startswith("Leave the step out and go on, or take it again")
    assert verified is (outcome is Trial.FINITE)
    assert told(tried(Change.NONE, outcome), cause=Cause.BENIGN_INF_MASK) == []


def test_what_cured_one_step_and_not_another_has_not_cured() -> None:
    bf16 = [tried(Change.BF16, Trial.FINITE), tried(Change.BF16, Trial.NONFINITE)]
    assert [verified for _, verified in told(*bf16)] == [False]
    assert trials.fp32_ok([FP32, tried(Change.FP32, Trial.NONFINITE)]) is False


def test_whether_float32_helps_is_known_only_where_it_ran() -> None:
    assert trials.fp32_ok([FP32]) is True
    assert trials.fp32_ok([tried(Change.FP32, Trial.UNAVAILABLE)]) is None
    assert trials.fp32_ok([TOGETHER]) is None


@pytest.mark.parametrize(
    ("in_part", "whole", "verified"),
    [(1.0, 0.4996, False), (0.5031, 0.4996, True), (0.0, 0.0, True), (-3.0, 3.0, False)],
    ids=["another loss", "rounding", "no loss left", "the other sign"],
)
@pytest.mark.parametrize("change", [Change.CONVERSIONS, Change.MODULES_FP32])
def test_a_part_in_float32_with_another_loss_than_float32_is_no_cure(
    change: Change, in_part: float, whole: float, verified: bool
) -> None:
    all_tried = [replace(tried(change, Trial.FINITE, "attn"), loss=in_part), replace(FP32, loss=whole)]
    told_of = [remedy.verified for remedy in remedies.remedies_tried(Cause.FP16_OVERFLOW, all_tried)]
    assert told_of == ([True] if verified else [True, False])
    assert remedies.remedies_tried(Cause.FP16_OVERFLOW, all_tried)[0].kind == (change if verified else Change.FP32)


def test_losses_are_compared_on_one_step_only() -> None:
    elsewhere = replace(FP32, loss=100.0, step=4)
    alone = replace(tried(Change.CONVERSIONS, Trial.FINITE), loss=1.0, conversions=(CodeLine("a.py", 1, "x.half()"),))
    (remedy,) = remedies.remedies_tried(Cause.FP16_OVERFLOW, [alone, elsewhere])
    assert remedy.kind == Change.CONVERSIONS
    assert remedy.verified
