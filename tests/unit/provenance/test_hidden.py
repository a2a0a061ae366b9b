"""Overflows that the code took for numbers: where that was done, and what float32 says of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from ampscope.provenance import Graph, hidden, hidden_beside
from ampscope.trace.schema import Phase, Source
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import FULL, HALF, INF, MASKED, NOTANUMBER, Part, Sheet, Span, Step

LARGE: Span = (0.0, 2e5)


@pytest.fixture
def step() -> Step:
    return Step()


def ways(step: Step) -> list[tuple[int, ...]]:
    return [origin.path for origin in hidden(step.graph())]


@pytest.mark.parametrize("name", ["nan_to_num", "where.self", "clamp", "masked_fill.Scalar", "tanh", "minimum"])
def test_what_makes_a_number_of_an_overflow_is_named(step: Step, name: str) -> None:
    product = step.op("mm", step.entry(), out=(0.0, INF))
    passed = step.op("view", product, out=(0.0, INF))
    made = step.op(name, passed)
    step.loss(made)
    assert ways(step) == [(product, passed, made)]


def test_what_is_written_in_place_is_hidden_there(step: Step) -> None:
    product = step.op("mm", step.entry(), out=NOTANUMBER)
    written = step.op("index_put_", Part(product, in_place=True))
    step.loss(step.op("mul.Tensor", written))
    assert ways(step) == [(product, written)]


def test_a_comparison_hides_nothing(step: Step) -> None:
    product = step.op("mm", step.entry(), out=(0.0, INF))
    step.op("ne.Scalar", product, dtype="bool")
    assert ways(step) == []


def test_a_choice_hides_it(step: Step) -> None:
    product = step.op("mm", step.entry(), out=(0.0, INF))
    chosen = step.op("argmin", product, dtype="int64")
    step.loss(step.op("index.Tensor", step.entry(), chosen))
    assert ways(step) == [(product, chosen)]


@pytest.mark.parametrize("dtype", [FULL, "bfloat16"])
def test_only_float16_ends_before_float32_does(step: Step, dtype: str) -> None:
    step.op("nan_to_num", step.op("mm", step.entry(), out=(0.0, INF), dtype=dtype))
    assert ways(step) == []


def test_what_is_meant_divided_away_overwritten_or_the_optimizers_is_not_hidden(step: Step) -> None:
    x = step.entry()
    meant = step.op("masked_fill.Scalar", x, out=MASKED, scalars={"value": -INF})
    total = step.op("sum", x, out=(0.0, INF))
    step.op("reciprocal", total)
    overwritten = step.op("mm", x, out=(0.0, INF))
    step.op("copy_", Part(overwritten, in_place=True), x)
    moved = step.op("mul.Tensor", x, out=(0.0, INF), phase=Phase.OPTIMIZER)
    for each in (meant, moved):
        step.op("clamp", each)
    assert ways(step) == []


# -- beside float32 -------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """What a product gave, and a guard after it."""

    out: Span
    guarded: Span
    born: dict[str, Any]
    made: dict[str, Any]


def run(sheet: TraceBuilder, dtype: str, source: Source, product: Product, *, read: bool = True) -> Graph:
    """One small step: what a guard makes of a product is read by the loss, or by nobody."""
    step = Step(sheet, source=source)
    born = step.op("mm", step.entry(), out=product.out, counts=product.born, dtype=dtype, line=1)
    made = step.op("nan_to_num", born, out=product.guarded, counts=product.made, dtype=dtype, line=2)
    if read:
        step.loss(made)
    return step.graph()


def found(half: Product, wide: Product, *, read: bool = True) -> list[int]:
    sheet = Sheet()
    ours = run(sheet, HALF, Source.REPLAY, half, read=read)
    theirs = run(sheet, FULL, Source.REPLAY_FP32, wide, read=read)
    return [origin.seq for origin in hidden_beside(ours, theirs)]


INFINITE: dict[str, Any] = {"posinf": 4}
CUT_OFF = Product((0.0, INF), (0.0, 65504.0), INFINITE, {"max_finite": 65504.0})
WHOLE = Product(LARGE, LARGE, {}, {"max_finite": 2e5})


def at_bound(out: Span, born: dict[str, Any], **counts: Any) -> Product:
    """A product that a guard bounds."""
    return Product(out, (0.0, 10.0), born, {"max_finite": 10.0, **counts})


def test_other_numbers_in_float32_prove_it() -> None:
    assert found(CUT_OFF, WHOLE) == [1]


def test_many_zeros_in_the_place_of_numbers_prove_it_whatever_the_largest_is() -> None:
    half = at_bound((0.0, INF), INFINITE, zeros=16, exp_low=0, exp_counts=(48,))
    assert found(half, at_bound(LARGE, {}, zeros=0, exp_low=0, exp_counts=(64,))) == [1]


def test_a_bound_that_float32_comes_to_as_well_is_meant() -> None:
    assert found(at_bound((0.0, INF), INFINITE), at_bound(LARGE, {})) == []


def test_infinities_that_float32_has_too_are_none_of_half_precision() -> None:
    assert found(CUT_OFF, WHOLE._replace(out=(0.0, INF), born=INFINITE)) == []


def test_what_no_loss_reads_does_no_harm() -> None:
    assert found(CUT_OFF, WHOLE, read=False) == []
