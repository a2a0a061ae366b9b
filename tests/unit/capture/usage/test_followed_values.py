"""Which tensors are taken for gradients."""

from __future__ import annotations

import torch

from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.capture.usage.followed_values import FollowedValues
from ampscope.capture.usage.scale_dependence import CONSTANT, SCALED


def test_what_takes_the_memory_of_a_gradient_that_is_gone_is_none() -> None:
    gradients = [torch.ones(8) for _ in range(4)]
    values = FollowedValues(lambda: gradients)
    values.find_gradients()
    assert {values.dependence_of(each) for each in gradients} == {SCALED}
    before = {storage_key(each) for each in gradients}
    gradients.clear()
    others = [torch.ones(8) for _ in range(64)]
    assert {values.dependence_of(each) for each in others} == {CONSTANT}
    assert before.isdisjoint(map(storage_key, others))


def test_nothing_is_held_after_the_next_backward() -> None:
    gradients = [torch.ones(8)]
    values = FollowedValues(lambda: gradients)
    values.find_gradients()
    values.backward_done()
    assert values.dependence_of(gradients[0]) == CONSTANT
    key = storage_key(gradients.pop())
    assert key in [storage_key(each) for each in [torch.ones(8) for _ in range(64)]]
