"""Rows of a batch that make its gradient, and rows of an input that stand out, in tensors of every kind."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from ampscope.capture.tracing.batch_rows import BatchRows, RowShare


def followed(output: Tensor, gradient: Tensor) -> RowShare | None:
    rows = BatchRows(contextlib.nullcontext)
    output = output * 1
    rows.returned({"logits": output})
    output.backward(gradient)
    return rows.few()


def test_the_few_rows_that_make_the_gradient_are_named() -> None:
    gradient = torch.full((16, 3), 0.01)
    gradient[3], gradient[11] = 5.0, -9.0
    found = followed(torch.zeros(16, 3, requires_grad=True), gradient)
    assert found is not None
    assert (found.rows, found.of) == ((3, 11), 16)
    assert 0.95 < found.share < 1


@pytest.mark.parametrize(
    "gradient",
    [
        pytest.param(torch.ones(16, 3), id="all alike"),
        pytest.param(torch.ones(4, 3) * torch.tensor([[100.0], [0.0], [0.0], [0.0]]), id="few rows in all"),
        pytest.param(torch.zeros(16, 3), id="nothing"),
    ],
)
def test_no_row_is_blamed_without_standing_out(gradient: Tensor) -> None:
    assert followed(torch.zeros_like(gradient, requires_grad=True), gradient) is None


def test_complex_outputs_have_rows_too() -> None:
    gradient = torch.zeros(16, 2, dtype=torch.complex64)
    gradient[7] = torch.tensor(3j)
    found = followed(torch.zeros(16, 2, dtype=torch.complex64, requires_grad=True), gradient)
    assert found is not None
    assert found.rows == (7,)


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(16, 2),
        torch.zeros(16, 2).index_fill(0, torch.tensor([3]), 9.0),
        torch.tensor(3.0),
        torch.arange(16),
        torch.ones(16, 2, dtype=torch.bool),
        torch.ones(16, 2, dtype=torch.complex64),
        torch.eye(16).to_sparse(),
        torch.ones(0, 2),
    ],
    ids=["alike", "most are zero", "a number", "integers", "truths", "complex", "sparse", "nothing"],
)
def test_an_input_without_outlying_rows_is_not_mentioned(given: Tensor) -> None:
    rows = BatchRows(contextlib.nullcontext)
    rows.given("x", given)
    assert rows.standing_out == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_an_outlying_row_is_named(dtype: torch.dtype) -> None:
    given = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)).add(0.1).to(dtype)
    given[9, 2] = -500
    rows = BatchRows(contextlib.nullcontext)
    rows.given("x", given)
    assert rows.standing_out == {"x": [9]}
