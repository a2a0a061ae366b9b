"""The walk from what matters back to where a non-finite value was born."""

from __future__ import annotations

from typing import Any

import pytest

from ampscope.provenance import absorbed, origins
from ampscope.trace.schema import Cast, Node, Phase
from tests.support.traced_steps import FINE, FULL, INF, MASKED, NOTANUMBER, OVERFLOWN, Part, Step


@pytest.fixture
def step() -> Step:
    return Step()


def born(step: Step) -> list[int]:
    return [origin.seq for origin in origins(step.graph())]


def test_a_step_in_which_all_is_finite_has_no_origin(step: Step) -> None:
    step.loss(step.op("mm", step.entry(), step.entry(Node.PARAMETER, "w")))
    assert born(step) == []


def test_an_infinity_that_reaches_nothing_that_matters_is_no_origin(step: Step) -> None:
    x = step.entry()
    step.op("exp", x, out=OVERFLOWN)
    step.loss(step.op("mm", x))
    assert born(step) == []


def test_an_empty_step_has_no_origin(step: Step) -> None:
    assert born(step) == []


def test_the_origin_is_found_through_a_chain_and_the_path_tells_the_way(step: Step) -> None:
    x = step.entry()
    product = step.op("mm", x, x, out=OVERFLOWN)
    other = step.op("relu", x)
    difference = step.op("sub.Tensor", product, other, out=OVERFLOWN)
    mean = step.op("mean", difference, out=NOTANUMBER)
    loss = step.loss(mean)
    (origin,) = origins(step.graph())
    assert (origin.seq, origin.out, origin.sink) == (product, 0, loss)
    assert origin.path == (product, difference, mean, loss)


@pytest.mark.parametrize("name", ["exp", "exp2", "expm1"])
def test_an_exponential_that_overflows_is_not_the_fault_of_the_mask_that_it_reads(step: Step, name: str) -> None:
    masked = step.op("masked_fill.Scalar", step.entry(), out=MASKED, scalars={"value": "-inf"})
    raised = step.op(name, masked, out=OVERFLOWN)
    step.loss(step.op("div.Tensor", raised, step.op("sum", raised, out=OVERFLOWN), out=NOTANUMBER))
    assert born(step) == [raised]


def test_an_infinity_that_an_exponential_was_given_comes_from_before(step: Step) -> None:
    product = step.op("mm", step.entry(), step.entry(), out=(-INF, INF))
    step.loss(step.op("exp", product, out=OVERFLOWN))
    assert born(step) == [product]


def test_the_output_that_went_bad_is_named(step: Step) -> None:
    x = step.entry()
    statistics = step.op("var_mean.correction", x, more=(NOTANUMBER,))
    step.loss(step.op("add.Tensor", Part(statistics, 1), x, out=NOTANUMBER))
    (origin,) = origins(step.graph())
    assert (origin.seq, origin.out) == (statistics, 1)


def test_a_finite_output_of_an_op_with_a_bad_one_is_not_followed(step: Step) -> None:
    x = step.entry()
    both = step.op("var_mean.correction", x, more=(NOTANUMBER,))
    root = step.op("rsqrt", Part(both, 0), out=OVERFLOWN)
    step.loss(root)
    assert born(step) == [root]


def test_births_before_the_loss_come_first_then_those_of_gradients_in_order(step: Step) -> None:
    x = step.entry()
    early = step.op("mm", x, out=OVERFLOWN)
    late = step.op("log", x, out=MASKED)
    backward = [step.backward("mul.Tensor", x, out=OVERFLOWN) for _ in range(2)]
    step.gradient(backward[1], "a")
    step.gradient(backward[0], "b")
    step.loss(step.op("add.Tensor", late, early, out=NOTANUMBER))
    assert born(step) == [early, late, backward[1], backward[0]]


def test_weights_come_before_gradients_and_buffers_last(step: Step) -> None:
    x = step.entry()
    running, gradient, update = (step.op(name, x, out=OVERFLOWN) for name in ("lerp_", "mul", "addcdiv_"))
    step.sink(running, Node.BUFFER_AFTER, "running_mean")
    step.gradient(gradient)
    step.sink(update, Node.WEIGHT_AFTER, "fc.weight")
    assert born(step) == [update, gradient, running]


def test_an_origin_that_reaches_two_sinks_is_one(step: Step) -> None:
    bad = step.op("mm", step.entry(), out=OVERFLOWN)
    step.gradient(step.backward("mul.Tensor", bad, out=OVERFLOWN))
    loss = step.loss(bad)
    (origin,) = origins(step.graph())
    assert (origin.seq, origin.sink) == (bad, loss)


def test_values_that_came_in_bad_are_origins(step: Step) -> None:
    x = step.entry(out=NOTANUMBER)
    step.loss(step.op("mm", x, step.entry(Node.PARAMETER, "w"), out=NOTANUMBER))
    assert born(step) == [x]


def test_what_was_not_measured_counts_as_finite(step: Step) -> None:
    index = step.entry(name="ids", out=(None, None), dtype="int64")
    bad = step.op("embedding", index, out=NOTANUMBER)
    step.loss(bad)
    assert born(step) == [bad]


# -- parts of tensors and writes in place ---------------------------------------------------------------------------


def test_a_finite_part_of_a_bad_tensor_is_a_finite_operand(step: Step) -> None:
    x = step.entry()
    packed = step.op("mm", x, out=OVERFLOWN)
    quotient = step.op("div.Tensor", Part(packed, span=(0.0, 1.0)), x, out=NOTANUMBER)
    step.loss(quotient)
    assert born(step) == [quotient]


def test_a_bad_part_of_a_tensor_is_followed_to_its_writer(step: Step) -> None:
    packed = step.op("mm", step.entry(), out=OVERFLOWN)
    step.loss(step.op("relu", Part(packed, span=(0.0, INF)), out=OVERFLOWN))
    assert born(step) == [packed]


def test_a_write_into_a_slice_keeps_what_was_bad_beside_it(step: Step) -> None:
    x = step.entry()
    whole = step.op("mm", x, out=OVERFLOWN)
    slice_written = step.op("copy_", Part(whole, in_place=True), x)
    later = step.op("copy_", Part(slice_written, in_place=True), x)
    step.loss(step.op("relu", Part(later, span=(0.0, INF)), out=OVERFLOWN))
    (origin,) = origins(step.graph())
    assert origin.seq == whole
    assert slice_written not in origin.path


def test_a_bad_write_into_a_slice_is_the_origin(step: Step) -> None:
    x = step.entry()
    whole = step.op("zeros")
    slice_written = step.op("copy_", Part(whole, in_place=True), x, out=OVERFLOWN)
    step.loss(step.op("relu", slice_written, out=OVERFLOWN))
    assert born(step) == [slice_written]


@pytest.mark.parametrize("name", ["copy_", "zero_", "fill_.Scalar", "fill_.Tensor"])
def test_an_op_that_overwrites_does_not_read_what_was_there(step: Step, name: str) -> None:
    old = step.op("log", step.entry(), out=MASKED)
    new = step.op(name, Part(old, in_place=True), step.entry(), out=NOTANUMBER)
    step.loss(new)
    assert born(step) == [new]


def test_an_op_in_place_that_computes_does_read_what_was_there(step: Step) -> None:
    old = step.op("log", step.entry(), out=MASKED)
    step.loss(step.op("add_.Tensor", Part(old, in_place=True), step.entry(), out=MASKED))
    assert born(step) == [old]


def test_memory_that_was_overwritten_with_good_values_is_good(step: Step) -> None:
    old = step.op("log", step.entry(), out=MASKED)
    zeros = step.op("zero_", Part(old, in_place=True), out=(0.0, 0.0))
    again = step.op("log", zeros, out=MASKED)
    step.loss(again)
    assert born(step) == [again]


# -- infinities on purpose ------------------------------------------------------------------------------------------


def test_a_mask_filled_with_minus_infinity_is_not_blamed_for_the_softmax(step: Step) -> None:
    masked = step.op("masked_fill.Scalar", step.entry(), out=MASKED, scalars={"value": -INF})
    softmax = step.op("_softmax", masked, out=NOTANUMBER)
    loss = step.loss(softmax)
    (origin,) = origins(step.graph())
    assert origin.seq == softmax
    assert origin.path == (softmax, loss)


@pytest.mark.parametrize("node", [Node.BUFFER, Node.INPUT])
def test_a_mask_that_is_added_is_not_blamed_for_the_softmax(step: Step, node: Node) -> None:
    mask = step.entry(node, "mask", out=(-INF, 0.0))
    masked = step.op("add.Tensor", step.entry(), mask, out=MASKED)
    softmax = step.op("_softmax", masked, out=NOTANUMBER)
    step.loss(softmax)
    assert born(step) == [softmax]


@pytest.mark.parametrize("shared", [True, False], ids=["one mask", "a mask each"])
def test_the_mask_of_a_later_layer_only_meets_the_nan_of_the_first(step: Step, shared: bool) -> None:
    masks = [step.entry(Node.INPUT, "mask", out=(-INF, 0.0)) for _ in range(1 if shared else 2)]
    softmax = step.op("_softmax", step.op("add.Tensor", step.entry(), masks[0], out=MASKED), out=NOTANUMBER)
    scores = step.op("mm", softmax, out=NOTANUMBER)
    step.loss(step.op("_softmax", step.op("add.Tensor", scores, masks[-1], out=NOTANUMBER), out=NOTANUMBER))
    assert born(step) == [softmax]


def test_an_overflow_is_blamed_for_the_softmax_it_ruins(step: Step) -> None:
    product = step.op("bmm", step.entry(), out=OVERFLOWN)
    step.loss(step.op("_softmax", product, out=NOTANUMBER))
    assert born(step) == [product]


def test_an_overflow_behind_a_mask_is_the_origin(step: Step) -> None:
    product = step.op("bmm", step.entry(), out=OVERFLOWN)
    masked = step.op("masked_fill.Scalar", product, out=(-INF, INF), scalars={"value": -INF})
    step.loss(step.op("_softmax", masked, out=NOTANUMBER))
    assert born(step) == [product]


@pytest.mark.parametrize("out", [(-INF, INF), NOTANUMBER, OVERFLOWN], ids=["both", "nan", "plus"])
def test_an_input_with_more_than_minus_infinity_is_no_mask(step: Step, out: tuple[float, float]) -> None:
    x = step.entry(out=out)
    step.loss(step.op("_softmax", x, out=NOTANUMBER))
    assert born(step) == [x]


def test_a_parameter_is_no_mask(step: Step) -> None:
    weight = step.entry(Node.PARAMETER, "w", out=MASKED)
    step.loss(step.op("_softmax", weight, out=NOTANUMBER))
    assert born(step) == [weight]


# -- recomputation --------------------------------------------------------------------------------------------------


def test_what_checkpointing_computes_again_is_told_as_the_forward_op(step: Step) -> None:
    x = step.entry()
    place: dict[str, Any] = {"module": "block", "line": 7}
    forward = step.op("exp", x, out=OVERFLOWN, **place)
    again = step.op("exp", x, out=OVERFLOWN, phase=Phase.RECOMPUTE, **place)
    gradient = step.backward("mul.Tensor", again, x, out=NOTANUMBER)
    sink = step.gradient(gradient)
    (origin,) = origins(step.graph())
    assert origin.seq == forward
    assert origin.path == (forward, gradient, sink)


def test_a_recomputed_op_and_its_twin_are_one_origin(step: Step) -> None:
    x = step.entry()
    place: dict[str, Any] = {"module": "block", "line": 7}
    forward = step.op("exp", x, out=OVERFLOWN, **place)
    again = step.op("exp", x, out=OVERFLOWN, phase=Phase.RECOMPUTE, **place)
    step.loss(forward)
    step.gradient(again)
    assert born(step) == [forward]


def test_a_recomputed_op_whose_first_run_was_finite_stands_for_itself(step: Step) -> None:
    x = step.entry()
    place: dict[str, Any] = {"module": "block", "line": 7}
    step.op("exp", x, out=FINE, **place)
    again = step.op("exp", x, out=OVERFLOWN, phase=Phase.RECOMPUTE, **place)
    step.gradient(again)
    assert born(step) == [again]


# -- overflows that a division swallows -----------------------------------------------------------------------------


def swallowed(step: Step) -> list[int]:
    return [origin.seq for origin in absorbed(step.graph())]


def test_a_norm_whose_square_overflowed_is_found_though_all_that_follows_is_finite(step: Step) -> None:
    x = step.entry()
    square = step.op("pow.Tensor_Scalar", x, out=(0.0, INF), scalars={"exponent": 2})
    mean = step.op("mean.dim", square, out=(0.0, INF))
    root = step.op("rsqrt", mean, out=(0.0, 1.0))
    step.loss(step.op("mul.Tensor", x, root))
    graph = step.graph()
    (origin,) = absorbed(graph)
    assert origin.seq == square
    assert origin.path == (square, mean, root)
    assert origins(graph) == []


@pytest.mark.parametrize(
    ("name", "scalars"), [("div.Tensor", {}), ("reciprocal", {}), ("pow.Tensor_Scalar", {"exponent": -0.5})]
)
def test_every_kind_of_division_swallows(step: Step, name: str, scalars: dict[str, float]) -> None:
    x = step.entry()
    total = step.op("sum", x, out=OVERFLOWN)
    step.op(name, *((x, total) if name == "div.Tensor" else (total,)), scalars=scalars)
    assert swallowed(step) == [total]


def test_an_infinity_that_is_divided_is_not_swallowed(step: Step) -> None:
    total = step.op("sum", step.entry(), out=OVERFLOWN)
    step.op("div.Tensor", total, step.entry(), out=OVERFLOWN)
    assert swallowed(step) == []


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "_softmax", "clamp", "minimum", "where.self", "erf"])
def test_an_overflow_into_a_function_that_saturates_gives_the_right_result(step: Step, name: str) -> None:
    step.op(name, step.op("mul.Tensor", step.entry(), out=(-INF, 1.0)))
    assert swallowed(step) == []


def test_a_cast_to_half_can_overflow_and_one_that_is_no_cast_cannot(step: Step) -> None:
    x = step.entry(dtype=FULL)
    cast = step.op("_to_copy", x, out=OVERFLOWN, cast=Cast.AUTOCAST)
    other = step.op("_to_copy", x, out=OVERFLOWN)
    for seq in (cast, other):
        step.op("reciprocal", seq)
    assert swallowed(step) == [cast]


def test_infinities_on_purpose_or_of_gradients_are_not_swallowed_overflows(step: Step) -> None:
    x = step.entry()
    on_purpose = step.op("mul.Tensor", x, out=MASKED, scalars={"other": -INF})
    gradient = step.backward("mul.Tensor", x, out=OVERFLOWN)
    for seq in (on_purpose, gradient):
        step.op("reciprocal", seq)
    assert swallowed(step) == []


# -- records that no program makes ----------------------------------------------------------------------------------


def test_a_cycle_ends_the_walk(step: Step) -> None:
    x = step.entry()
    ahead = 2
    first = step.op("mul.Tensor", x, ahead, out=NOTANUMBER)
    second = step.op("mul.Tensor", first, out=NOTANUMBER)
    assert second == ahead
    step.loss(second)
    assert born(step) == []


def test_a_cycle_of_writes_in_place_ends_the_walk(step: Step) -> None:
    first = step.op("copy_", Part(1, in_place=True))
    second = step.op("copy_", Part(first, in_place=True))
    step.loss(step.op("relu", Part(second, span=(0.0, INF)), out=OVERFLOWN))
    step.op("div.Tensor", step.op("sum", step.entry(), out=OVERFLOWN), Part(second, span=(0.0, INF)))
    graph = step.graph()
    assert len(origins(graph)) == 1
    assert absorbed(graph) == []
