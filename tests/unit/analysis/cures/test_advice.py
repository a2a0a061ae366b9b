"""General advice beside what replays have tried: told once, and with the reason where no replay has tried it."""

from __future__ import annotations

import pytest

from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.cures.remedies import remedies
from ampscope.analysis.results import FormTried, Remedy, SourceLine, Tried
from ampscope.trace.schema import Change, Form, Trial
from ampscope.trace.vocabulary import Cause

PLACE = SourceLine(file="net.py", line=3, function="f", code="")


def tried(form: Form, outcome: Trial, call: str = "log") -> Tried:
    """A form that a replay has tried."""
    return Tried(
        step=4, change=Change.FORM, outcome=outcome, form=FormTried(form=form, call=call, source=PLACE, value=1e-4)
    )


IN_VAIN = Tried(step=4, change=Change.FP32, outcome=Trial.NONFINITE)
HELPED = Tried(step=4, change=Change.FP32, outcome=Trial.FINITE)


def told(cause: Cause, *trials: Tried) -> list[Remedy]:
    """The remedies, but for float32 everywhere."""
    return [each for each in remedies(cause, tried=trials) if "float32 everywhere" not in each.text]


@pytest.mark.parametrize("outcome", [Trial.FINITE, Trial.NONFINITE])
def test_what_a_replay_has_tried_is_not_told_a_second_time(outcome: Trial) -> None:
    found = told(Cause.LOG_ZERO, IN_VAIN, tried(Form.LOGSIGMOID, outcome))
    assert [each.kind for each in found if each.verified is not None] == [Form.LOGSIGMOID]
    assert [each.kind for each in found if each.verified is None] == [Form.OPERAND_BOUND]


def test_a_constant_speaks_for_a_bound() -> None:
    (only,) = told(Cause.POW_GRAD_ZERO, IN_VAIN, tried(Form.ADDED_EPS, Trial.FINITE, "pow"))
    assert only.verified


def test_what_is_left_says_that_another_one_came_first() -> None:
    (_, bound) = told(Cause.LOG_ZERO, IN_VAIN, tried(Form.LOG_SOFTMAX, Trial.FINITE))
    assert bound.untried == "another form has cured the step before its turn came"


def test_and_where_none_has_when_a_replay_would_try_it() -> None:
    left = [
        each
        for each in told(Cause.LOG_ZERO, IN_VAIN, tried(Form.OPERAND_BOUND, Trial.NONFINITE))
        if each.verified is None
    ]
    assert [each.untried.split()[:4] for each in left] == [["a", "replay", "tries", "it"]]


def test_a_form_that_comes_before_the_cure_has_no_place_there() -> None:
    (bound, *_) = found = told(Cause.LOG_ZERO, IN_VAIN, tried(Form.OPERAND_BOUND, Trial.FINITE))
    assert [each.kind for each in found if each.verified is None] == []
    assert bound.verified


@pytest.mark.parametrize("cause", [cause for cause in Cause if CATALOGUE[cause].remedies])
@pytest.mark.parametrize("trials", [(), (IN_VAIN,), (HELPED,)], ids=["untried", "in vain", "helped"])
def test_every_advice_says_why_it_was_not_tried(cause: Cause, trials: tuple[Tried, ...]) -> None:
    found = remedies(cause, op="aten.bmm.default", module="attn", tried=trials)
    assert all(each.verified is not None or each.untried for each in found)


def test_a_call_has_no_turn_where_what_it_is_given_was_widened() -> None:
    """Beside a variance by centred squares, too, whose turn comes before."""
    converted = Tried(step=4, change=Change.CONVERSIONS, outcome=Trial.FINITE)
    centred = tried(Form.CENTRED, Trial.FINITE, "sub")
    for trials, reason in (((HELPED, centred, converted), "converts"), ((HELPED, centred), "before its turn came")):
        found = remedies(Cause.FP16_OVERFLOW, op="aten.mul.Tensor", tried=trials)
        (call,) = (each for each in found if each.kind == Form.IN_FLOAT32)
        assert reason in call.untried


def test_centred_values_are_advised_unless_a_later_form_was_the_first_to_fit() -> None:
    op, bound = "aten.sqrt.default", tried(Form.OPERAND_BOUND, Trial.FINITE, "sqrt")
    kinds = {each.kind for each in remedies(Cause.SQRT_NEGATIVE, op=op)}
    assert kinds == {Form.CENTRED, Form.OPERAND_BOUND}
    assert Form.CENTRED not in {each.kind for each in remedies(Cause.SQRT_NEGATIVE, op=op, tried=(bound,))}
