"""A replay in another dtype draws what the real step drew."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampscope.capture.isolation.write_guard import WriteGuard
from ampscope.capture.tape.taped_step import Drawn, Draws

SHAPE = (64, 128)  # so many that float16 rounds one to the end of its range
WIDE = (torch.float32, torch.float64, torch.bfloat16)


def filled(fill: Callable[[Tensor], Tensor]) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: fill(torch.zeros(SHAPE, dtype=dtype))


def in_a_part(x: Tensor) -> Tensor:
    x.t()[3:].uniform_()
    return x


def second(dtype: torch.dtype) -> Tensor:
    torch.rand(3)
    return torch.rand(SHAPE, dtype=dtype)


VALUES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "rand": lambda dtype: torch.rand(SHAPE, dtype=dtype),
    "randn": lambda dtype: torch.randn(SHAPE, dtype=dtype),
    "with a generator": lambda dtype: torch.rand(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(1)),
    "rand_like": filled(torch.rand_like),
    "randn_like": filled(torch.randn_like),
    "like in another dtype": lambda dtype: torch.rand_like(torch.zeros(SHAPE), dtype=dtype),
    "normal": lambda dtype: torch.normal(0.0, 1.0, SHAPE, dtype=dtype),
    "normal_": filled(lambda x: x.normal_()),
    "uniform_": filled(lambda x: x.uniform_(-1, 1)),
    "in a part": filled(in_a_part),
    "exponential_": filled(lambda x: x.exponential_()),
    "log_normal_": filled(lambda x: x.log_normal_()),
    "the second": second,
}


def run(call: Callable[[], Tensor], known: Drawn, *, notes: bool) -> Tensor:
    torch.manual_seed(0)
    with WriteGuard(Draws(known, notes=notes).run):
        return call()


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_the_real_step(name: str, wide: torch.dtype) -> None:
    call, known = VALUES[name], Drawn()
    real = run(lambda: call(torch.float16), known, notes=True)
    again = run(lambda: call(wide), known, notes=False)
    assert again.dtype is wide
    assert again.equal(real.to(wide))


def test_what_is_drawn_of_a_default_dtype() -> None:
    known = Drawn()
    real = run(lambda: torch.rand(SHAPE), known, notes=True)
    assert run(lambda: torch.rand(SHAPE), known, notes=False).equal(real)
    assert run(lambda: torch.rand(SHAPE, dtype=torch.float64), known, notes=False).equal(real.double())


@pytest.mark.parametrize("drop", [lambda x: F.dropout(x, 0.3), lambda x: torch.native_dropout(x, 0.3, True)[0]])
def test_what_is_dropped_is_the_same_and_the_rest_is_not_rounded(drop: Callable[[Tensor], Tensor]) -> None:
    x, known = torch.full(SHAPE, 1e6), Drawn()  # infinite in float16
    real = run(lambda: drop(x.half()), known, notes=True)
    again = run(lambda: drop(x), known, notes=False)
    assert (again == 0).equal(real.nan_to_num() == 0)
    assert again.max().item() == pytest.approx(1e6 / 0.7)
    assert 0.2 < (again == 0).float().mean().item() < 0.4


def test_nothing_is_dropped_in_evaluation() -> None:
    known = Drawn()
    run(lambda: torch.native_dropout(torch.ones(SHAPE).half(), 0.3, False)[0], known, notes=True)
    assert run(lambda: torch.native_dropout(torch.ones(SHAPE), 0.3, False)[0], known, notes=False).eq(1).all()


def test_what_depends_on_values_is_computed_from_them() -> None:
    known, means = Drawn(), torch.full(SHAPE, 1e6)
    assert run(lambda: torch.normal(means.half(), 1.0), known, notes=True).isinf().all()
    assert run(lambda: torch.normal(means, 1.0), known, notes=False).isfinite().all()


def test_a_draw_that_the_real_step_did_not_make_is_its_own() -> None:
    known = Drawn()
    run(lambda: torch.rand(4, dtype=torch.float16), known, notes=True)
    torch.manual_seed(0)
    expected = torch.rand(8), torch.rand(8)
    both = run(lambda: torch.cat([torch.rand(8, dtype=torch.float16).float(), torch.rand(8)]), known, notes=False)
    assert both[8:].equal(expected[1])
    assert math.isfinite(both[:8].sum().item())
