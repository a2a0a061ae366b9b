"""What is counted of a tensor for formats of blocks, and its largest magnitudes, against a plain count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ampscope.capture.tracing.exponent_histogram import SAMPLE, ExponentHistogram, Samples, width
from ampscope.trace.schema import BLOCK, BLOCK_FALLS, TOP_VALUES


def seen(*tensors: Tensor) -> dict[int, ExponentHistogram]:
    samples = Samples(torch.device("cpu"), width(tensors[0]), len(tensors), for_formats=True)
    for number, tensor in enumerate(tensors):
        samples.add(number, tensor, tensor)
    return samples.empty()


def counted(tensor: Tensor) -> list[int]:
    """Elements by powers of two below the largest of their block; of all of them."""
    falls: list[int] = []
    for block in tensor.double().reshape(-1).split(BLOCK):
        powers = [math.frexp(abs(each))[1] for each in block.tolist() if each and math.isfinite(each)]
        falls += [max(powers) - power for power in powers]
    return [falls.count(fall) for fall in range(max(falls) + 1)]


SPREAD = torch.exp(3 * torch.randn(70, 50, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(SPREAD, id="not whole blocks"),
        pytest.param(SPREAD[:64].t(), id="transposed"),
        pytest.param((SPREAD * 1e-7).half(), id="zeros and subnormals"),
        pytest.param(SPREAD.double() * 1e-300, id="float64"),
        pytest.param(SPREAD * 1e-38, id="subnormals of float32"),
        pytest.param(torch.tensor([3.0]), id="one"),
    ],
)
def test_small_tensors_are_counted_whole(tensor: Tensor) -> None:
    found = seen(torch.zeros(5, dtype=tensor.dtype), tensor, tensor)
    assert found[0].block_falls is found[0].top_values is None
    assert found[1] == found[2]
    assert list(found[1].block_falls or ()) == counted(tensor)
    largest = tensor.double().abs().flatten().sort(descending=True).values[:TOP_VALUES].tolist()
    assert list(found[1].top_values or ()) == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_of_large_ones_whole_blocks(transposed: bool) -> None:
    rows = torch.ones(300, BLOCK)
    rows[:, 1:] = 2.0**-5  # in each block one leads
    tensor = rows.clone() if not transposed else rows.t().contiguous().t()
    assert tensor.is_contiguous() is not transposed
    (found,) = seen(tensor).values()
    assert found.top_values is None
    falls = found.block_falls or ()
    assert tensor.numel() > SAMPLE
    assert sum(falls) == tensor.numel()
    assert falls == (300, 0, 0, 0, 0, 300 * (BLOCK - 1))


def test_what_is_not_finite_leads_no_block() -> None:
    (found,) = seen(torch.tensor([math.inf, math.nan, 4.0, -2.0, 0.0])).values()
    assert found.block_falls == (1, 1)
    assert found.top_values == (4.0, 2.0, 0.0)


def test_what_lies_farthest_below_is_counted_with_the_last() -> None:
    (found,) = seen(torch.tensor([1.0, 2.0**-39, 2.0**-60, 2.0**-100, 0.0])).values()
    assert found.block_falls == (1, *[0] * (BLOCK_FALLS - 2), 3)
