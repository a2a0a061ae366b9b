"""Zeros that float32 would not have had: counted as a twin of the op in float32 says, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.tracing import operators
from ampscope.capture.tracing.exponent_histogram import SAMPLE
from ampscope.capture.tracing.sampled_shapes import FlushedZeros, Given

ATEN = torch.ops.aten
Op = Callable[..., Tensor]


class Watching(TorchDispatchMode):
    """Looks at every result as a sampled step does."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = FlushedZeros()
        self.ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = operators.describe(func)
        if not operator.passes_through:
            results = operators.flat_tensors(result if isinstance(result, (tuple, list)) else (result,))
            for each in results:
                if each.is_floating_point():
                    self.flushed.look(self.ran, Given(operator, args, kwargs or {}, len(results) == 1), each)
                    self.ran += 1
        return result


def counted(op: Op, *operands: Tensor) -> int | None:
    """What is counted in the last result of an op."""
    watching = Watching()
    with watching:
        op(*operands)
    return watching.flushed.read().get(watching.ran - 1)


def wide(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def by_twin(op: Op, *operands: Tensor) -> int:
    """The same by the op's twin on the operands in float32."""
    half, twin = op(*operands), op(*map(wide, operands))
    return int(((half == 0) & (twin.float() != 0)).sum())


def spread(*shape: int, low: float = -14.0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Numbers of either sign from ``2**low`` to 1, and some zeros."""
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(torch.rand(*shape, generator=generator) * -low + low)
    values *= torch.randint(-1, 2, shape, generator=generator)
    return values.to(dtype)


SMALL = spread(40, 50)
OPS: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
    "product": (torch.mul, (SMALL, spread(40, 50, low=-20.0))),
    "product with a number": (lambda x: x * 1e-6, (SMALL,)),
    "product broadcast": (torch.mul, (SMALL, spread(50, low=-20.0))),
    "product transposed": (lambda x, y: x.t() * y, (SMALL, spread(50, 40))),
    "quotient": (torch.div, (SMALL, torch.full((40, 50), 3e4).half())),
    "square": (torch.square, (SMALL,)),
    "exponential": (torch.exp, (-20 * spread(40, 50).abs() - 5,)),
    "silu": (F.silu, (-25 * spread(40, 50).abs(),)),
    "softmax": (lambda x: x.softmax(-1), (20 * SMALL,)),
    "softmax of long rows": (lambda x: x.softmax(-1), (20 * spread(3, 9000),)),
    "log of softmax": (lambda x: x.log_softmax(-1), (20 * SMALL,)),
    "gradient of a sigmoid": (ATEN.sigmoid_backward, (SMALL * 0.001, torch.sigmoid(-20 * SMALL.abs()))),
    "gradient of a softmax": (
        lambda g, y: ATEN._softmax_backward_data(g, y, -1, y.dtype),
        (SMALL * 0.001, (20 * SMALL).softmax(-1)),
    ),
    "bfloat16": (lambda x: x * 1e-30, (spread(40, 50, low=-60.0, dtype=torch.bfloat16),)),
}


@pytest.mark.parametrize("name", OPS)
def test_they_are_those_of_the_twin(name: str) -> None:
    op, operands = OPS[name]
    found = counted(op, *operands)
    whole = by_twin(op, *operands)
    if name == "softmax of long rows":  # one of three is looked at
        rows = [by_twin(op, row) for row in operands[0]]
        assert found == 3 * rows[0]
    else:
        assert found == whole
    assert found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_flushes_what_is_below_its_smallest_number(dtype: torch.dtype) -> None:
    values = spread(30, 60, low=-149.0, dtype=torch.float32)
    assert counted(lambda x: x.to(dtype), values) == int(((values.to(dtype) == 0) & (values != 0)).sum()) > 0
    room = torch.ones(30, 60, dtype=dtype)
    assert counted(room.copy_, values) == int(((room == 0) & (values != 0)).sum()) > 0


def test_what_a_cast_from_float64_flushes_is_what_float32_holds() -> None:
    values = torch.tensor([1e-60, 1e-30, 1.0, 0.0], dtype=torch.float64)
    assert counted(lambda x: x.half(), values) == 1


def test_of_a_large_result_a_sample_tells() -> None:
    values = spread(64, 1024, low=-40.0, dtype=torch.float32)
    found = counted(lambda x: x.half(), values)
    assert found is not None
    assert values.numel() > 4 * SAMPLE
    assert found == pytest.approx(int(((values.half() == 0) & (values != 0)).sum()), rel=0.05)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda x: x * 0.5, id="product"),
        pytest.param(torch.relu, id="relu"),
        pytest.param(lambda x: F.dropout(x, 0.5), id="dropout"),
        pytest.param(lambda x: x + x.flip(0), id="sum"),
        pytest.param(lambda x: x - x, id="difference of the same"),
        pytest.param(lambda x: x.sum(0), id="sum of many"),
        pytest.param(lambda x: torch.cat([x, torch.zeros_like(x)]), id="joined with zeros"),
        pytest.param(lambda x: x.masked_fill(x > 0, 0.0), id="masked"),
        pytest.param(lambda x: x.masked_fill(x > 0, -60000.0).softmax(-1), id="softmax of what is masked"),
        pytest.param(lambda x: (x.float() * 0.0).half(), id="zeros cast"),
        pytest.param(torch.floor, id="floor"),
        pytest.param(lambda x: x.clamp(min=0.0), id="clamp"),
    ],
)
def test_zeros_that_float32_has_too_are_none(op: Op) -> None:
    assert counted(op, spread(40, 50, low=-8.0)) == 0


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(lambda x: x @ x.t(), id="product of matrices"),
        pytest.param(lambda x: x.mean(0), id="mean"),
        pytest.param(lambda x: F.layer_norm(x, (50,)), id="normalisation"),
        pytest.param(torch.rand_like, id="random"),
        pytest.param(lambda x: x.clone().mul_(1e-6), id="its operand is gone"),
        pytest.param(lambda x: x.float() * 1e-6, id="float32"),
        pytest.param(lambda x: x.softmax(0), id="softmax of columns"),
    ],
)
def test_elsewhere_it_is_not_known(op: Op) -> None:
    assert counted(op, SMALL) is None
