"""Where a step lost what float32 keeps: two executions of one small step, written op by op."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from ampscope.provenance import Graph, HowLost, cancelled, lost_mass
from ampscope.trace.schema import EdgeRow, Node, OpRow, Phase, SiteRow, Statistics

N = 64


class Op(NamedTuple):
    """An op of 64 elements, all of one magnitude but for some zeros."""

    op: str
    reads: tuple[int, ...] = ()
    size: float = 1.0
    zeros: int = 0
    phase: str = Phase.BACKWARD
    dtype: str = "float16"
    name: str = ""


def step(*ops: Op) -> Graph:
    sites = {n: _site(n, op) for n, op in enumerate(ops)}
    rows = [OpRow(0, "replay", n, 0, n, 0, N, statistics=_statistics(op)) for n, op in enumerate(ops)]
    edges = [
        EdgeRow(0, "replay", n, arg, read, 0, False, False, None, None)
        for n, op in enumerate(ops)
        for arg, read in enumerate(op.reads)
    ]
    return Graph(rows, edges, sites.__getitem__)


def _site(number: int, op: Op) -> SiteRow:
    name = op.op if op.op in list(Node) else f"aten.{op.op}.default"
    ends = (op.dtype,), ("64",)
    return SiteRow(
        number, name, op.name, "part", "Part", op.phase, "a.py", 1, "f", "", *ends, *ends, "{}", "", "", "", None
    )


def _statistics(op: Op) -> Statistics:
    exponent = 0
    while 2.0**exponent > op.size:
        exponent -= 1
    some = N - op.zeros
    counts = (some,) if some else ()
    return Statistics(
        0.0, op.size, 0, 0, 0, op.zeros, 0, op.size if some else 0.0, op.size if some else None,
        exponent if some else None, counts if some else None,
    )  # fmt: skip


def gradient(*, before: Op, size: float, zeros: int, dtype: str = "float16") -> Graph:
    return step(
        before,
        Op("mul", (0,), size=size, zeros=zeros, dtype=dtype),
        Op(Node.GRADIENT, (1,), size=size, zeros=zeros, dtype=dtype, name="w"),
    )


TINY = 2.0**-26


@pytest.mark.parametrize(("size", "how"), [(TINY, HowLost.FLUSHED), (2.0**-8, HowLost.ROUNDED)])
def test_the_op_is_where_exact_zeros_begin(size: float, how: HowLost) -> None:
    fine = Op("exp", size=2.0**-10)
    loss = lost_mass(gradient(before=fine, size=size, zeros=N), gradient(before=fine, size=size, zeros=0), {"w"})
    assert loss is not None
    assert (loss.origin.seq, loss.origin.path, loss.how, loss.share) == (1, (1, 2), how, 1.0)


def test_zeros_that_float32_has_too_are_no_loss() -> None:
    both = gradient(before=Op("exp"), size=TINY, zeros=N // 2)
    assert lost_mass(both, both, {"w"}) is None


def test_less_mass_without_zeros_is_rounding() -> None:
    half, wide = (gradient(before=Op("exp"), size=size, zeros=0) for size in (2.0**-11, 2.0**-10))
    assert lost_mass(half, wide, {"w"}) is None


def test_only_the_gradients_in_question_are_followed() -> None:
    half, wide = (gradient(before=Op("exp"), size=TINY, zeros=zeros) for zeros in (N, 0))
    assert lost_mass(half, wide, {"another"}) is None


def test_a_saturated_operand_is_named_in_place_of_its_gradient() -> None:
    def of(size: float, zeros: int) -> Graph:
        squashed = Op("sigmoid", size=size, phase=Phase.FORWARD)
        return gradient(before=squashed, size=2.0**-8, zeros=zeros)

    loss = lost_mass(of(1.0, N), of(0.75, 0), {"w"})
    assert loss is not None
    assert (loss.origin.seq, loss.how) == (0, HowLost.SATURATED)


def test_a_cast_that_float32_does_without_stands_beside_what_it_reads() -> None:
    product, end = Op("mul", size=TINY, dtype="float32"), Op(Node.GRADIENT, size=TINY, name="w")
    half = step(product, Op("_to_copy", (0,), size=TINY, zeros=N), end._replace(reads=(1,), zeros=N))
    wide = step(product, end._replace(reads=(0,)))
    loss = lost_mass(half, wide, {"w"})
    assert loss is not None
    assert (loss.origin.seq, loss.how) == (1, HowLost.FLUSHED)


def test_what_a_sum_that_cancels_leaves_in_float32_is_nothing_to_lose() -> None:
    def of(size: float, zeros: int) -> Graph:
        end = Op(Node.GRADIENT, (2,), size=size, zeros=zeros, name="w")
        return step(Op("exp"), Op("sum", (0,), size=size, zeros=zeros), Op("mul", (1,), size=size, zeros=zeros), end)

    noise = of(2.0**-23, 0)
    assert cancelled(noise) == {1, 2}
    assert lost_mass(of(2.0**-23, N), noise, {"w"}) is None


@pytest.mark.parametrize(("size", "is_noise"), [(2.0**-23, True), (2.0**-12, False)])
def test_what_a_difference_of_equals_leaves_in_float32_is_nothing_to_lose(size: float, *, is_noise: bool) -> None:
    """Two branches that agree: half precision has exact zeros, float32 its rounding, or a difference that it keeps."""

    def of(zeros: int) -> Graph:
        difference = Op("sub", (0, 1), size=size, zeros=zeros)
        return step(Op("exp"), Op("tanh"), difference, difference._replace(op=Node.GRADIENT, reads=(2,), name="w"))

    assert (lost_mass(of(N), of(0), {"w"}) is None) is is_noise
