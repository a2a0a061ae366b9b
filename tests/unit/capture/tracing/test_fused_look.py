"""The fused kernel sees what torch's own reductions see, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ampscope.capture.tracing import full_statistics
from ampscope.capture.tracing.full_statistics import Census, FusedLook
from ampscope.trace.schema import Statistics

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def kernel() -> Iterator[None]:
    """Triton decides when it and the kernel are first imported whether its interpreter runs them."""
    if HERE.type == "cpu" and "triton" in sys.modules:
        pytest.skip("Triton was imported without its interpreter, and there is no GPU")
    with pytest.MonkeyPatch.context() as patch:
        if HERE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton", reason="needs Triton")
        import ampscope.capture.tracing.fused_kernel  # noqa: F401

        yield


def tensors(dtype: torch.dtype) -> Iterator[Tensor]:
    torch.manual_seed(0)
    usual = torch.randn(9001, device=HERE).to(dtype)
    yield usual
    yield usual[:1]
    yield usual[1:77]
    for values in ([math.inf], [-math.inf, 1.0], [math.nan, 2.0, math.inf], [math.nan], [math.inf, -math.inf]):
        bad = usual.clone()
        bad[-len(values) :] = torch.tensor(values, device=HERE, dtype=dtype)
        yield bad
        yield bad[-len(values) :]
    yield torch.tensor(-3.0, device=HERE, dtype=dtype)
    yield torch.full((5,), -0.0, device=HERE, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_tells_what_torch_tells(dtype: torch.dtype) -> None:
    fused, expected = FusedLook(HERE), []
    for tensor in tensors(dtype):
        assert fused.accepts(tensor)
        fused.look(tensor)
        expected.append(Census().look(tensor))

    assert list(map(words, fused.read())) == list(map(words, expected))


def words(seen: Statistics) -> list[str]:
    """Statistics that compare equal where NaN is NaN; a zero has no sign."""
    return [str(value + 0.0 if isinstance(value, float) else value) for value in seen]


def test_more_tensors_than_there_was_room_for() -> None:
    fused = FusedLook(HERE)
    for number in range(300):
        assert fused.look(torch.full((3,), float(number), device=HERE)) == number

    assert [seen.max for seen in fused.read()] == [float(number) for number in range(300)]


def test_what_the_kernel_cannot_read_is_left_to_torch() -> None:
    fused = FusedLook(HERE)
    square = torch.ones(4, 4, device=HERE)

    refused = [square.t(), square[:, ::2], square.double(), square.int(), torch._neg_view(square)]

    assert [fused.accepts(tensor) for tensor in refused] == [False] * len(refused)


def test_a_census_is_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> list[Statistics]:
        census = Census()
        for tensor in [*tensors(torch.float16), torch.ones(3, 3).t().double(), torch.tensor([1j, 2])]:
            census.measure(tensor)
        return census.read()

    usual = taken()
    monkeypatch.setattr(Census, "_fused_look", lambda census, device: census._fused.setdefault(device, FusedLook(HERE)))

    assert list(map(words, taken())) == list(map(words, usual))
    assert full_statistics.FUSED is False
