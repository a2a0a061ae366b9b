"""A change of precision reaches the user's code that a backward runs: recomputations and custom backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ampscope.capture.changes.replay_change import EverythingIn
from ampscope.capture.torch_support.user_line import NOWHERE

_RUN = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # torch does not export it


@pytest.mark.parametrize(
    ("through", "reentrant"),
    [
        ("torch.autograd.backward", True),
        ("torch.autograd.backward", False),
        ("Tensor.backward", True),
        ("Tensor.backward", False),
        ("torch.autograd.grad", False),  # the reentrant checkpoint refuses it
    ],
)
def test_a_recomputation_converts_to_what_is_tried(through: str, reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    def block(x: Tensor) -> Tensor:
        half = (x * 2).half()
        seen.append(half.dtype)
        return half.float().sin()

    x = torch.ones(3, requires_grad=True)
    with EverythingIn(torch.float32).active(lambda: NOWHERE):
        loss = checkpoint(block, x, use_reentrant=reentrant).sum()
        if through == "torch.autograd.grad":
            torch.autograd.grad(loss, x)
        else:
            (torch.autograd.backward if through == "torch.autograd.backward" else Tensor.backward)(loss)
    assert seen == [torch.float32] * 2
    assert torch.autograd._engine_run_backward is _RUN  # type: ignore[attr-defined]


def test_a_custom_backward_converts_to_what_is_tried() -> None:
    seen: list[torch.dtype] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            half = gradient.to(torch.float16)
            seen.append(half.dtype)
            return half.to(gradient.dtype) * 2

    x = torch.ones(3, requires_grad=True)
    with EverythingIn(torch.float32).active(lambda: NOWHERE):
        Doubled.apply(x).sum().backward()
    assert seen == [torch.float32]
    assert torch._C._len_torch_function_stack() == 0
