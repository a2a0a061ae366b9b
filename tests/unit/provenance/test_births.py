"""Non-finite values that are meant, or harm nothing, and traces of which a part is lost."""

from __future__ import annotations

import pytest

from ampscope.provenance import Harmless, absorbed, harmless_births, origins
from ampscope.trace.schema import Cast
from tests.support.traced_steps import FINE, FULL, INF, MASKED, NOTANUMBER, OVERFLOWN, Part, Step


@pytest.fixture
def step() -> Step:
    return Step()


def born(step: Step) -> list[int]:
    return [origin.seq for origin in origins(step.graph())]


# -- masks as logarithms, exponentials that saturate, traces that are cut -------------------------------------------


def test_the_logarithm_of_a_mask_is_meant_and_the_softmax_over_a_full_row_is_not(step: Step) -> None:
    mask = step.op("_to_copy", step.entry(name="keep", dtype=FULL), cast=Cast.EXPLICIT)
    scores = step.op("add.Tensor", step.entry(), step.op("log", mask, out=MASKED), out=MASKED)
    softmax = step.op("_softmax", scores, out=NOTANUMBER)
    step.loss(softmax)
    assert born(step) == [softmax]


@pytest.mark.parametrize("then", ["mm", "mul.Tensor"])
def test_the_logarithm_of_a_zero_in_the_batch_is_not_meant_where_nothing_masks(step: Step, then: str) -> None:
    log = step.op("log", step.entry(), out=MASKED)
    step.loss(step.op(then, log, step.entry(), out=NOTANUMBER))
    assert born(step) == [log]


def test_an_exponential_below_a_constant_gives_zero_as_it_should(step: Step) -> None:
    raised = step.op("exp", step.entry(), out=OVERFLOWN)
    step.loss(step.op("reciprocal", step.op("add.Tensor", raised, out=OVERFLOWN)))
    assert absorbed(step.graph()) == []


def test_an_exponential_below_a_value_swallows_it(step: Step) -> None:
    raised = step.op("exp", step.entry(), out=OVERFLOWN)
    step.loss(step.op("div.Tensor", step.entry(), raised))
    assert [origin.seq for origin in absorbed(step.graph())] == [raised]


def test_an_op_whose_operands_the_trace_has_lost_comes_last(step: Step) -> None:
    x = step.entry()
    cut = step.op("relu", x, out=OVERFLOWN)
    whole = step.op("mm", x, out=OVERFLOWN)
    step.loss(step.op("add.Tensor", cut, whole, out=NOTANUMBER))
    graph = step.graph()
    graph.inputs[cut].clear()
    assert [origin.seq for origin in origins(graph)] == [whole, cut]


def test_a_long_chain_of_writes_into_parts_is_followed(step: Step) -> None:
    value = step.op("mm", step.entry(), out=OVERFLOWN)
    first = value
    for _ in range(3000):
        value = step.op("fill_.Scalar", Part(value, span=FINE, in_place=True))
    step.loss(step.op("relu", value, out=OVERFLOWN))
    assert born(step) == [first]


# -- what harms nothing ---------------------------------------------------------------------------------------------


def harmless(step: Step) -> list[tuple[int, Harmless]]:
    return [(birth.seq, birth.why) for birth in harmless_births(step.graph())]


def test_a_mask_that_a_softmax_reads_is_harmless(step: Step) -> None:
    mask = step.op("masked_fill.Scalar", step.entry(), out=MASKED, scalars={"value": -INF})
    step.loss(step.op("_softmax", mask))
    assert harmless(step) == [(mask, Harmless.MASK)]


def test_a_value_that_is_replaced_is_harmless(step: Step) -> None:
    log = step.op("log", step.entry(), out=MASKED)
    step.loss(step.op("where.self", log, step.entry()))
    assert harmless(step) == [(log, Harmless.MASKED)]


def test_a_metric_is_harmless(step: Step) -> None:
    mean = step.op("mean", step.entry(), out=NOTANUMBER)
    step.op("add.Tensor", mean, out=NOTANUMBER)
    step.loss(step.op("mm", step.entry()))
    assert harmless(step) == [(mean, Harmless.UNUSED)]


def test_what_reaches_the_loss_is_not_harmless_nor_is_what_a_division_swallowed(step: Step) -> None:
    x = step.entry()
    root = step.op("rsqrt", step.op("pow.Tensor_Scalar", x, out=OVERFLOWN))
    step.op("mul.Tensor", x, root)
    step.loss(step.op("mm", x, out=OVERFLOWN))
    assert harmless(step) == []
