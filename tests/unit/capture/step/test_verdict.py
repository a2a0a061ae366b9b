"""What makes a step an incident: gradients, losses and buffers, each alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.events import OpenStep, StepAttempt
from ampscope.capture.loop_state.held_state import HeldTensor
from ampscope.capture.step import gradients, verdict
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import StateKind, Trigger


def attempted(*, gradient: float = 1.0, loss: float = 1.0) -> tuple[StepAttempt, Models]:
    """An attempt of a model whose weight has ``gradient`` in one place, after a backward of ``loss``."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.ones(2, 2)
    model.weight.grad[0, 0] = gradient
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    opened = OpenStep(0.0)
    opened.backward([torch.tensor(loss)])
    attempt = StepAttempt(optimizer, 0, 0, None, opened, norm=gradients.total_norm(optimizer))
    return attempt, Models([model])


def test_a_skip_is_the_gradients_fault_unless_the_loss_was_bad_already() -> None:
    bad = verdict.of_skip(*attempted(gradient=math.inf))
    assert bad.trigger is Trigger.NONFINITE_GRADIENT
    assert bad.symptom.gradients == bad.symptom.judged == {"weight"}
    assert verdict.of_skip(*attempted(gradient=math.nan, loss=math.nan)).trigger is Trigger.NONFINITE_LOSS


def test_without_a_scaler_the_norm_tells() -> None:
    assert verdict.of_unscaled_step(*attempted()) is None
    bad = verdict.of_unscaled_step(*attempted(gradient=math.nan))
    assert bad is not None
    assert (bad.trigger, bad.symptom.gradients) == (Trigger.NONFINITE_GRADIENT, frozenset({"weight"}))


def test_a_norm_that_overflows_by_itself_is_nobodys_fault() -> None:
    attempt, models = attempted(gradient=3e38)
    assert attempt.norm is not None
    assert not attempt.norm.isfinite()
    assert verdict.of_unscaled_step(attempt, models) is None


def test_what_a_fused_optimizer_saw_is_told_by_its_norms() -> None:
    norms: dict[str, Tensor] = {"a": torch.tensor(1.0), "b": torch.tensor(math.inf)}
    bad = verdict.of_device_skip(norms)
    assert (bad.symptom.gradients, bad.symptom.judged) == (frozenset("b"), frozenset("ab"))


@pytest.mark.parametrize(
    ("loss", "poisoned", "trigger"),
    [
        (1.0, [], None),
        (math.inf, [], Trigger.NONFINITE_LOSS),
        (1.0, [StateKind.BUFFER], Trigger.NONFINITE_BUFFER),
        (1.0, [StateKind.CARRIED], Trigger.NONFINITE_STATE),
        (1.0, [StateKind.CARRIED, StateKind.BUFFER], Trigger.NONFINITE_BUFFER),
        (math.nan, [StateKind.BUFFER], Trigger.NONFINITE_LOSS),
    ],
)
def test_what_gradients_do_not_tell(loss: float, poisoned: list[StateKind], trigger: Trigger | None) -> None:
    held = [HeldTensor(kind, "norm.running_mean", "", torch.tensor(math.nan)) for kind in poisoned]
    bad = verdict.of_what_gradients_hide(attempted(loss=loss)[0], held)
    assert (bad.trigger if bad else None) is trigger
