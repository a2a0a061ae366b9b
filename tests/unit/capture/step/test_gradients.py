"""Norms of gradients: finite where the gradients are, whatever their dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampscope.capture.step import gradients
from ampscope.capture.torch_support.models import Models


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_finite_gradients_is_finite(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.weight.grad = torch.full_like(model.weight, 60_000)
    model.bias.grad = torch.zeros_like(model.bias)
    total = gradients.total_norm(optimizer)
    assert total is not None
    assert total.dtype is torch.float32
    assert float(total) == pytest.approx(120_000, rel=1e-2)
    by_name = gradients.norms_by_name(optimizer, Models([model]))
    assert float(by_name["weight"]) == pytest.approx(120_000, rel=1e-2)
    assert float(by_name["bias"]) == 0.0
