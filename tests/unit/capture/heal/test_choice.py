"""Which of the changes that made a step finite may last."""

from __future__ import annotations

import pytest
from torch import nn

from ampscope.capture.changes.replaced_calls import LossForms
from ampscope.capture.changes.replay_results import ChangedResult, TrialResult
from ampscope.capture.heal.cure_choice import lasting
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.schema import Change, Trial


def trial(change: Change, loss: float | None, *modules: str) -> TrialResult:
    return TrialResult(change, modules, (), None, ChangedResult(Trial.FINITE, loss=loss))


@pytest.mark.parametrize(
    ("in_part", "in_whole", "lasts"),
    [(0.51, 0.5, True), (1.0, 0.5, False), (1.0, None, True), (None, 0.5, True), (1.0, float("inf"), True)],
)
def test_a_part_in_float32_whose_loss_is_another_than_that_of_all_in_float32(
    in_part: float | None, in_whole: float | None, lasts: bool
) -> None:
    models = Models([nn.Sequential(nn.Linear(2, 2))])
    tried = [trial(Change.FP32, in_whole), trial(Change.MODULES_FP32, in_part, "0")]
    found = list(lasting(tried, None, Sites(0, str), models, None, LossForms()))
    assert [each.text for each in found] == (["0 in float32"] if lasts else [])
