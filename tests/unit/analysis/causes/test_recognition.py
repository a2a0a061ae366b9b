"""The cause that is named for an origin: one known failure a row, written as the tracer would have seen it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from ampscope.analysis.causes.catalogue import OP_RULES, explanation
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Occurrence
from ampscope.analysis.causes.mathematics import NextToZero
from ampscope.analysis.causes.outside import CameIn, FromOthers
from ampscope.analysis.causes.overflow import Overflowed
from ampscope.analysis.causes.recognition import Recognised, first_overflow, recognise
from ampscope.analysis.causes.underflow import ConstantLost
from ampscope.analysis.op_facts import Executed
from ampscope.provenance import origins
from ampscope.trace.schema import Cast, Node, Phase
from ampscope.trace.vocabulary import Cause
from tests.support.traced_steps import FINE, FULL, HALF, INF, MASKED, NOTANUMBER, OVERFLOWN, Part, Span, Step

POSITIVE, ZERO = (0.0, 1.0), (0.0, 0.0)
BF16 = "bfloat16"


def named(step: Step) -> tuple[Cause, str, str]:
    """Cause, phase and the op named, for the origin that matters most."""
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    return found.cause, found.phase, graph.site(found.seq).op


class Alone(NamedTuple):
    """An op of the forward pass that needs nothing but its own operands to be understood."""

    op: str
    operands: tuple[Span, ...]
    out: Span
    cause: Cause
    scalars: Mapping[str, object] = MappingProxyType({})
    dtype: str = HALF
    shapes: tuple[str, str] = ("8x8", "8x8")
    more: tuple[Span, ...] = ()


ALONE = [
    # past 65504
    Alone("bmm", ((-300.0, 300.0), (-300.0, 300.0)), (-1.0, INF), Cause.FP16_OVERFLOW),
    Alone("addmm", (FINE, (-300.0, 300.0), (-300.0, 300.0)), NOTANUMBER, Cause.FP16_OVERFLOW, {"beta": 1, "alpha": 1}),
    Alone("pow.Tensor_Scalar", ((-300.0, 300.0),), (0.0, INF), Cause.FP16_OVERFLOW, {"exponent": 2}),
    Alone("sum", ((0.0, 100.0),), (INF, INF), Cause.FP16_OVERFLOW),
    Alone("exp", ((0.0, 12.0),), (1.0, INF), Cause.FP16_OVERFLOW),
    Alone("_to_copy", ((0.0, 70000.0),), (0.0, INF), Cause.FP16_OVERFLOW),
    Alone("div.Tensor", ((0.0, 100.0), (1e-4, 1.0)), (0.0, INF), Cause.FP16_OVERFLOW),
    Alone("exp", ((0.0, 100.0),), (1.0, INF), Cause.DIVERGENCE, dtype=FULL),
    Alone("mul.Tensor", ((0.0, 1e30), (0.0, 1e30)), (0.0, INF), Cause.DIVERGENCE, dtype=BF16),
    # too small to overflow: changed since they were written
    Alone("addmm", (FINE, (-30.0, 30.0), FINE), NOTANUMBER, Cause.HARDWARE_TRANSIENT, {"beta": 1, "alpha": 1}),
    Alone("add.Tensor", (FINE, FINE), NOTANUMBER, Cause.HARDWARE_TRANSIENT, {"alpha": 1}, dtype=FULL),
    # a constant that does not fit
    Alone("mul.Tensor", (POSITIVE,), (-INF, 0.0), Cause.LITERAL_OVERFLOW, {"other": -1e9}),
    Alone("scalar_tensor", (), (-INF, -INF), Cause.LITERAL_OVERFLOW, {"s": -1e9}),
    Alone("mul.Tensor", ((0.0, 1e38),), (-INF, 0.0), Cause.DIVERGENCE, {"other": -1e9}, dtype=FULL),
    # 0/0 and its kin
    Alone("_softmax", (MASKED,), NOTANUMBER, Cause.ALL_MASKED_SOFTMAX, {"dim": -1}),
    Alone("_log_softmax", (MASKED,), NOTANUMBER, Cause.ALL_MASKED_SOFTMAX, {"dim": -1}, dtype=FULL),
    Alone("_ctc_loss", (FINE,), (0.0, INF), Cause.CTC_INFEASIBLE, dtype=FULL),
    Alone("log", (POSITIVE,), MASKED, Cause.LOG_ZERO),
    Alone("log1p", ((-1.0, 1.0),), MASKED, Cause.LOG_ZERO, dtype=FULL),
    Alone("logit", (POSITIVE,), MASKED, Cause.LOG_ZERO),
    Alone("log", (FINE,), NOTANUMBER, Cause.LOG_ZERO, dtype=FULL),
    Alone("xlogy.Tensor", (POSITIVE, POSITIVE), MASKED, Cause.LOG_ZERO),
    Alone("div.Tensor", (FINE, POSITIVE), NOTANUMBER, Cause.DIV_ZERO, dtype=FULL),
    Alone("div.Tensor", (FINE,), NOTANUMBER, Cause.DIV_ZERO, {"other": 0}, dtype=FULL),
    Alone("reciprocal", (POSITIVE,), (1.0, INF), Cause.DIV_ZERO),
    # by next to nothing: an ordinary number over it leaves float32; a huge one over an ordinary one does so by itself
    Alone("div.Tensor", ((0.0, 100.0), (1e-39, 1.0)), (0.0, INF), Cause.DIV_ZERO, dtype=FULL),
    Alone("div.Tensor", ((0.0, 100.0),), (0.0, INF), Cause.DIV_ZERO, {"other": 1e-40}, dtype=BF16),
    Alone("reciprocal", ((1e-40, 1.0),), (1.0, INF), Cause.DIV_ZERO, dtype=FULL),
    Alone("div.Tensor", ((0.0, 1e35), (1e-5, 1.0)), (0.0, INF), Cause.DIVERGENCE, dtype=FULL),
    Alone("rsqrt", (POSITIVE,), (1.0, INF), Cause.DIV_ZERO),
    Alone("pow.Tensor_Scalar", (POSITIVE,), (1.0, INF), Cause.DIV_ZERO, {"exponent": -0.5}),
    Alone("pow.Tensor_Tensor", (POSITIVE, (-1.0, 2.0)), (1.0, INF), Cause.DIV_ZERO),
    Alone("mean.dim", ((None, None),), NOTANUMBER, Cause.DIV_ZERO, shapes=("0x8", "8")),
    Alone("mean", ((None, None),), NOTANUMBER, Cause.DIV_ZERO, dtype=FULL, shapes=("0", "")),
    Alone("std.correction", (FINE,), NOTANUMBER, Cause.DIV_ZERO, dtype=FULL, shapes=("1x8", "8")),
    Alone("var_mean.correction", (FINE,), NOTANUMBER, Cause.DIV_ZERO, shapes=("1", "")),
    Alone("mean", ((0.0, 3e4),), (INF, INF), Cause.FP16_OVERFLOW, shapes=("64", "")),
    Alone("nll_loss_forward", (FINE,), NOTANUMBER, Cause.DIV_ZERO, dtype=FULL, more=(ZERO,)),
    # outside of where it is defined
    Alone("sqrt", (FINE,), NOTANUMBER, Cause.SQRT_NEGATIVE),
    Alone("rsqrt", ((-1e-7, 1.0),), NOTANUMBER, Cause.SQRT_NEGATIVE, dtype=FULL),
    Alone("pow.Tensor_Scalar", (FINE,), NOTANUMBER, Cause.SQRT_NEGATIVE, {"exponent": 0.5}),
    Alone("pow.Tensor_Tensor", (FINE, (3.3, 3.3)), NOTANUMBER, Cause.SQRT_NEGATIVE),
    Alone("pow.Tensor_Tensor", (FINE, (3.3, 3.3)), NOTANUMBER, Cause.SQRT_NEGATIVE, dtype=FULL),
    Alone("pow.Scalar", (FINE,), NOTANUMBER, Cause.SQRT_NEGATIVE, {"self": -2.0}, dtype=FULL),
    Alone("pow.Tensor_Tensor", ((-300.0, 1.0), (2.0, 2.0)), (0.0, INF), Cause.FP16_OVERFLOW),
    Alone("pow.Tensor_Tensor", ((0.0, 1e30), (3.3, 3.3)), (0.0, INF), Cause.DIVERGENCE, dtype=FULL),
    Alone("pow.Tensor_Scalar", ((-300.0, 1.0),), (0.0, INF), Cause.FP16_OVERFLOW, {"exponent": 2.0}),
    Alone("acos", ((-1.1, 1.0),), NOTANUMBER, Cause.UNKNOWN, dtype=FULL),
    # a constant that is infinite on purpose
    Alone("masked_fill.Scalar", (FINE,), MASKED, Cause.UNKNOWN, {"value": -INF}),
    Alone("mul.Tensor", (POSITIVE,), NOTANUMBER, Cause.UNKNOWN, {"other": -INF}, dtype=FULL),
    # complex numbers: those below zero have a root and a logarithm, and one is zero if both parts are
    Alone("mul.Tensor", ((-1e30, 1e30), (-1e30, 1e30)), NOTANUMBER, Cause.DIVERGENCE, dtype="complex64"),
    Alone("mul.Tensor", ((-300.0, 300.0), (-300.0, 300.0)), NOTANUMBER, Cause.FP16_OVERFLOW, dtype="complex32"),
    Alone("div.Tensor", (FINE, ZERO), NOTANUMBER, Cause.DIV_ZERO, dtype="complex64"),
    Alone("div.Tensor", (FINE, POSITIVE), NOTANUMBER, Cause.UNKNOWN, dtype="complex64"),
    Alone("abs", ((0.0, 65000.0),), (0.0, INF), Cause.FP16_OVERFLOW, dtype="complex32"),
    # too small for any product: what a fused op divides by, a norm of zeros perhaps, the trace does not say
    Alone("_weight_norm_interface", (FINE, FINE), NOTANUMBER, Cause.UNKNOWN, dtype=FULL),
    Alone("_weight_norm_interface", (FINE, (0.0, 1e30)), NOTANUMBER, Cause.DIVERGENCE, dtype=FULL),
    # what solves a matrix
    Alone("linalg_inv_ex", (FINE,), NOTANUMBER, Cause.UNKNOWN, dtype=FULL),
    Alone("linalg_vector_norm", ((0.0, 1e30),), (INF, INF), Cause.DIVERGENCE, dtype=FULL),
    # 0/0 of a large operand, none of whose zeros were in the sample; more than a trace can say
    Alone("div.Tensor", (FINE, FINE), NOTANUMBER, Cause.DIV_ZERO, dtype=FULL),
    Alone("mul.Tensor", ((0.0, 3.4028234663852886e38),) * 2, (0.0, INF), Cause.DIVERGENCE, dtype="float64"),
    # an 8-bit dtype has NaN for what is too large
    Alone("_to_copy", ((0.0, 1e4),), NOTANUMBER, Cause.FP16_OVERFLOW, dtype="float8_e4m3fn"),
    Alone("_to_copy", ((0.0, 6e4),), (0.0, INF), Cause.FP16_OVERFLOW, dtype="float8_e5m2"),
    Alone("_to_copy", ((0.0, 300.0),), NOTANUMBER, Cause.UNKNOWN, dtype="float8_e4m3fn"),
    # an operand that was not measured
    Alone("mul.Tensor", (FINE, (None, None)), NOTANUMBER, Cause.UNKNOWN, dtype=FULL),
    Alone("log", ((None, None),), MASKED, Cause.UNKNOWN),
    Alone("where.self", (FINE, (None, None)), NOTANUMBER, Cause.UNKNOWN),
    Alone("mul.Tensor", ((None, None),), (-INF, 0.0), Cause.LITERAL_OVERFLOW, {"other": -1e9}),
    # an op on integers or in a dtype nobody knows
    Alone("some_new_op", (FINE,), NOTANUMBER, Cause.UNKNOWN, dtype="float8_e4m3fn"),
]


def alone(known: Alone) -> tuple[Step, int]:
    """A step in which the op reads its operands, the first of which is number 0, and the loss reads the op."""
    step = Step()
    operands = [step.entry(out=span, dtype=known.dtype, shape=known.shapes[0]) for span in known.operands]
    columns: dict[str, Any] = {
        "scalars": dict(known.scalars),
        "dtype": known.dtype,
        "shape": known.shapes[1],
        "more": known.more,
    }
    bad = step.op(known.op, *operands, out=known.out, **columns)
    step.loss(bad)
    return step, bad


@pytest.mark.parametrize("known", ALONE, ids=[f"{row.op}-{row.cause}-{row.dtype}" for row in ALONE])
def test_an_op_is_understood_by_its_operands(known: Alone) -> None:
    step, bad = alone(known)
    graph = step.graph()
    (origin,) = origins(graph)
    assert origin.seq == bad
    found = recognise(graph, origin)
    at = 0 if known.cause is Cause.HARDWARE_TRANSIENT else bad
    assert (found.cause, found.phase, found.seq) == (known.cause, Phase.FORWARD, at)


@pytest.mark.parametrize("known", ALONE, ids=[f"{row.op}-{row.cause}-{row.dtype}" for row in ALONE])
def test_rules_of_one_turn_exclude_each_other(known: Alone) -> None:
    step, bad = alone(known)
    op = Executed(step.graph(), bad)
    turns = [rule.turn for rule in OP_RULES if rule.phase in (None, Phase.FORWARD) and rule.match(op) is not None]
    assert len(turns) == len(set(turns))


# -- constants that their dtype rounds away -------------------------------------------------------------------------


def _eps_added(step: Step) -> int:
    """normalize(x) by hand: x / (norm + 1e-8)."""
    norm = step.op("linalg_vector_norm", step.entry(), out=POSITIVE, zeros=1)
    safe = step.op("add.Tensor", norm, out=POSITIVE, zeros=1, scalars={"other": 1e-8})
    return step.op("div.Tensor", step.entry(), safe, out=NOTANUMBER)


def _eps_clamped(step: Step) -> int:
    """log(p.clamp(min=1e-8))"""
    clamped = step.op("clamp", step.entry(), out=POSITIVE, scalars={"min": 1e-8})
    return step.op("log", clamped, out=MASKED)


def _clamped_to_one(step: Step) -> int:
    """log(1 - p.clamp(max=1 - 1e-4))"""
    clamped = step.op("clamp", step.entry(), out=POSITIVE, scalars={"min": 1e-4, "max": 1 - 1e-4})
    rest = step.op("rsub.Scalar", clamped, out=POSITIVE, zeros=1, scalars={"other": 1})
    return step.op("log", rest, out=MASKED)


def _eps_in_a_root(step: Step) -> int:
    variance = step.op("add.Tensor", step.entry(), out=POSITIVE, scalars={"other": 1e-12})
    return step.op("rsqrt", variance, out=OVERFLOWN)


@pytest.mark.parametrize(
    ("build", "constant", "becomes"),
    [
        (_eps_added, 1e-8, 0.0),
        (_eps_clamped, 1e-8, 0.0),
        (_clamped_to_one, 1 - 1e-4, 1.0),
        (_eps_in_a_root, 1e-12, 0.0),
    ],
)
def test_a_constant_that_vanished_is_blamed(build: Callable[[Step], int], constant: float, becomes: float) -> None:
    step = Step()
    bad = build(step)
    step.loss(bad)
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    assert (found.cause, found.seq) == (Cause.EPS_UNDERFLOW, bad)
    assert isinstance(found.reason, ConstantLost)
    assert (found.reason.value, found.reason.becomes, found.reason.dtype) == (constant, becomes, HALF)
    assert found.reason.lost_by is not None
    assert graph.outputs[found.reason.lost_by][0].min in (0.0, becomes)


@pytest.mark.parametrize(("eps", "dtype"), [(1e-8, BF16), (1e-8, FULL), (1e-4, HALF)])
def test_a_constant_that_survived_is_not_blamed(eps: float, dtype: str) -> None:
    step = Step()
    x = step.entry(out=(-1.0, 0.0), dtype=dtype)
    safe = step.op("add.Tensor", x, out=(-1.0, 0.0), scalars={"other": eps}, dtype=dtype)
    step.loss(step.op("div.Tensor", x, safe, out=NOTANUMBER, dtype=dtype))
    assert named(step)[0] is Cause.DIV_ZERO


def test_lines_that_overflow_likewise_are_named_unless_it_does_no_harm() -> None:
    step = Step()
    x = step.entry(out=POSITIVE)
    guarded = step.op("nan_to_num", step.op("sum", x, out=OVERFLOWN))
    first = step.op("sum", x, out=OVERFLOWN, line=7)
    second = step.op("sum", x, out=OVERFLOWN, line=8)
    step.loss(step.op("stack", guarded, first, second, out=OVERFLOWN))
    found = recognise(step.graph(), origins(step.graph())[0])
    assert isinstance(found.reason, Overflowed)
    assert [line.line for line in found.reason.likewise] == [8 if found.seq == first else 7]


def test_only_constants_that_keep_an_operand_away_from_zero_are_blamed() -> None:
    step = Step()
    scaled = step.op("mul.Tensor", step.entry(), out=POSITIVE, zeros=1, scalars={"other": 1e-8})
    moved = step.op("add.Tensor", scaled, scaled, out=POSITIVE, zeros=1, scalars={"alpha": 1e-8})
    product = step.op("addcmul", moved, moved, moved, out=POSITIVE, zeros=1, scalars={"value": 1e-8})
    step.loss(step.op("log", product, out=MASKED))
    assert named(step)[0] is Cause.LOG_ZERO


def test_a_constant_far_upstream_is_not_blamed() -> None:
    step = Step()
    value = step.op("add.Tensor", step.entry(), scalars={"other": 1e-8})
    for _ in range(10):
        value = step.op("relu", value, out=POSITIVE)
    step.loss(step.op("log", value, out=MASKED))
    assert named(step)[0] is Cause.LOG_ZERO


# -- divisors that a small dtype flushed to zero --------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "cause"), [(HALF, Cause.FP16_UNDERFLOW), (FULL, Cause.DIV_ZERO)])
def test_a_divisor_that_was_flushed_to_zero(dtype: str, cause: Cause) -> None:
    step = Step()
    x = step.entry(out=(1e-5, 1e-4), dtype=dtype)
    square = step.op("mul.Tensor", x, x, out=ZERO, zeros=64, dtype=dtype)
    step.loss(step.op("div.Tensor", x, square, out=(INF, INF), dtype=dtype))
    assert named(step) == (cause, Phase.FORWARD, "aten.div.Tensor")


def test_a_divisor_made_of_zeros_was_not_flushed() -> None:
    step = Step()
    x = step.entry(out=POSITIVE, zeros=3)
    square = step.op("mul.Tensor", x, x, out=POSITIVE, zeros=3)
    step.loss(step.op("div.Tensor", x, square, out=NOTANUMBER))
    assert named(step)[0] is Cause.DIV_ZERO


def test_a_zero_inside_the_span_of_a_divisor_is_seen_by_its_count() -> None:
    for zeros, reason in ((1, NOTHING_MORE), (0, NextToZero())):
        step = Step()
        divisor = step.op("sub.Tensor", step.entry(), out=FINE, zeros=zeros, dtype=FULL)
        step.loss(step.op("div.Tensor", step.entry(), divisor, out=OVERFLOWN, dtype=FULL))
        graph = step.graph()
        found = recognise(graph, origins(graph)[0])
        assert (found.cause, found.reason) == (Cause.DIV_ZERO, reason)


# -- backward -------------------------------------------------------------------------------------------------------


def test_a_square_root_at_zero_has_no_gradient() -> None:
    step = Step()
    root = step.op("sqrt", step.entry(), out=POSITIVE, zeros=1, dtype=FULL)
    step.loss(root)
    twice = step.backward("mul.Scalar", root, out=POSITIVE, zeros=1, dtype=FULL, of=root, scalars={"other": 2})
    bad = step.backward("div.Tensor", step.entry(), twice, out=OVERFLOWN, dtype=FULL, of=root, grad_fn="SqrtBackward0")
    step.gradient(bad)
    assert named(step) == (Cause.SQRT_GRAD_ZERO, Phase.BACKWARD, "aten.div.Tensor")


def test_a_power_below_one_at_zero_has_no_gradient() -> None:
    step = Step()
    x = step.entry(out=POSITIVE, zeros=1)
    power = step.op("pow.Tensor_Scalar", x, out=POSITIVE, scalars={"exponent": 0.5})
    slope = {"scalars": {"exponent": -0.5}, "grad_fn": "PowBackward0"}
    step.gradient(step.backward("pow.Tensor_Scalar", x, out=(1.0, INF), of=power, **slope))
    assert named(step) == (Cause.POW_GRAD_ZERO, Phase.BACKWARD, "aten.pow.Tensor_Scalar")


def test_a_power_that_a_function_takes_in_its_own_backward_divides_by_zero() -> None:
    step = Step()
    x = step.entry(out=POSITIVE, zeros=1)
    forward = step.op("mul.Tensor", x, x, out=POSITIVE)
    inverse = {"scalars": {"exponent": -1.0}, "grad_fn": "ProjectBackward"}
    step.gradient(step.backward("pow.Tensor_Scalar", x, out=(1.0, INF), of=forward, **inverse))
    assert named(step)[0] is not Cause.POW_GRAD_ZERO


def test_a_power_can_be_too_large_in_backward() -> None:
    step = Step()
    x = step.entry(out=(0.0, 3e4))
    power = step.op("pow.Tensor_Scalar", x, out=POSITIVE, scalars={"exponent": 2})
    handed = step.backward("mul.Tensor", step.entry(), grad_fn="MulBackward0")
    step.gradient(step.backward("mul.Tensor", handed, x, out=(0.0, INF), of=power, grad_fn="PowBackward0"))
    assert named(step)[0] is Cause.SCALE_OVERFLOW


def test_what_overflows_in_backward_before_the_gradient_comes_in_is_not_the_loss_scale() -> None:
    step = Step()
    root = step.op("rsqrt", step.entry(out=(1e-4, 1.0)), out=(1.0, 100.0))
    handed = step.backward("mul.Tensor", step.entry(), grad_fn="MulBackward0")
    power = step.backward(
        "pow.Tensor_Scalar", root, of=root, out=(1.0, INF), scalars={"exponent": 3}, grad_fn="RsqrtBackward0"
    )
    step.gradient(step.backward("mul.Tensor", handed, power, of=root, out=OVERFLOWN, grad_fn="RsqrtBackward0"))
    assert named(step) == (Cause.FP16_OVERFLOW, Phase.BACKWARD, "aten.pow.Tensor_Scalar")


@pytest.mark.parametrize("op", ["mm", "mul.Tensor", "_to_copy", "_softmax_backward_data", "convolution_backward"])
def test_a_finite_forward_and_a_backward_that_leaves_half_is_the_loss_scale(op: str) -> None:
    step = Step()
    forward = step.op("mm", step.entry())
    step.loss(forward)
    handed = step.backward("mul.Tensor", step.entry(), grad_fn="MulBackward0")
    step.gradient(step.backward(op, handed, forward, out=OVERFLOWN, of=forward, grad_fn="MmBackward0"))
    assert named(step) == (Cause.SCALE_OVERFLOW, Phase.BACKWARD, f"aten.{op}" if "." in op else f"aten.{op}.default")


@pytest.mark.parametrize(("seed", "carries"), [(1.0, False), (1024.0, True)])
def test_a_derivative_that_the_loss_is_computed_from_carries_the_scale_that_it_was_multiplied_by(
    seed: float, carries: bool
) -> None:
    step = Step()
    forward = step.op("mm", step.entry())
    handed = step.backward("mul.Tensor", step.entry(), step.entry(out=(seed, seed)), grad_fn="MulBackward0")
    slope = step.backward("mm", handed, forward, out=OVERFLOWN, of=forward, grad_fn="MmBackward0")
    step.loss(step.op("mean", slope, out=OVERFLOWN))
    assert Executed(step.graph(), slope).carries(1024.0) is carries


def test_a_division_by_zero_in_backward_is_not_the_loss_scale() -> None:
    step = Step()
    x = step.entry(out=POSITIVE)
    step.gradient(step.backward("div.Tensor", x, x, out=OVERFLOWN, grad_fn="SomeBackward0"))
    assert named(step)[:2] == (Cause.DIV_ZERO, Phase.BACKWARD)


@pytest.mark.parametrize(
    ("selects", "cause"),
    [
        ("where.self", Cause.WHERE_GRAD_TRAP),
        ("masked_fill.Scalar", Cause.WHERE_GRAD_TRAP),
        ("nan_to_num", Cause.DIV_ZERO),
    ],
)
def test_a_value_that_a_mask_hid_in_forward_is_named_there(selects: str, cause: Cause) -> None:
    """where(b > 0, a / b, 0): the loss is finite, the gradient of the division is not."""
    step = Step()
    a, b = step.entry(dtype=FULL, out=POSITIVE), step.entry(dtype=FULL, out=POSITIVE)
    quotient = step.op("div.Tensor", a, b, out=NOTANUMBER, dtype=FULL)
    step.loss(step.op(selects, quotient, dtype=FULL))
    masked = step.backward(selects, step.entry(dtype=FULL), dtype=FULL)
    bad = step.backward("div.Tensor", masked, b, out=NOTANUMBER, dtype=FULL, of=quotient, grad_fn="DivBackward0")
    step.gradient(bad)
    graph = step.graph()
    (origin,) = origins(graph)
    found = recognise(graph, origin)
    assert origin.seq == bad
    assert (found.cause, found.seq, found.phase) == (cause, quotient, Phase.FORWARD)
    occurrence = Occurrence(op=graph.site(found.seq).op, reason=found.reason, masked=found.masked)
    assert "0 times an infinity is NaN" in explanation(found.cause, occurrence)


@pytest.mark.parametrize(
    ("leaves_out", "cause"),
    [
        ("where.self", Cause.WHERE_GRAD_TRAP),
        ("nan_to_num", Cause.WHERE_GRAD_TRAP),
        ("minimum", Cause.WHERE_GRAD_TRAP),
        ("clamp", Cause.WHERE_GRAD_TRAP),
        ("index.Tensor", Cause.WHERE_GRAD_TRAP),
        ("sigmoid", Cause.LOG_ZERO),
        ("exp", Cause.LOG_ZERO),
    ],
)
def test_an_infinity_is_a_trap_for_its_gradient_whatever_leaves_it_out(leaves_out: str, cause: Cause) -> None:
    """An op that computes a finite number of it does not leave it out."""
    step = Step()
    x = step.entry(dtype=FULL, out=POSITIVE)
    logarithm = step.op("log", x, out=(-INF, 0.0), dtype=FULL)
    kept = step.op(leaves_out, step.op("mul.Tensor", logarithm, out=(-INF, 0.0), dtype=FULL), dtype=FULL)
    step.loss(kept)
    handed = step.backward(leaves_out, step.entry(dtype=FULL), dtype=FULL)
    step.gradient(
        step.backward("div.Tensor", handed, x, out=NOTANUMBER, dtype=FULL, of=logarithm, grad_fn="LogBackward0")
    )
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    assert (found.cause, found.seq, found.phase) == (cause, logarithm, Phase.FORWARD)


# -- from outside ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "cause"),
    [(Node.INPUT, Cause.BAD_INPUT), (Node.PARAMETER, Cause.BAD_WEIGHT), (Node.BUFFER, Cause.BAD_BUFFER)],
)
def test_what_came_in_bad_is_named(node: Node, cause: Cause) -> None:
    step = Step()
    bad = step.entry(node, "the name", out=NOTANUMBER)
    step.loss(step.op("mm", bad, out=NOTANUMBER))
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    assert (found.cause, found.seq, found.reason) == (cause, bad, CameIn(name="the name"))


def test_minus_infinity_that_is_summed_over_is_data_and_one_that_is_added_is_a_mask() -> None:
    step = Step()
    data = step.entry(Node.INPUT, "counts", out=MASKED)
    step.loss(step.op("addmm", step.op("_to_copy", data, out=MASKED), out=NOTANUMBER))
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    assert (found.cause, found.seq) == (Cause.BAD_INPUT, data)
    masks = Step()
    masked = masks.op("add.Tensor", masks.entry(), masks.entry(Node.INPUT, "mask", out=MASKED), out=MASKED)
    softmax = masks.op("_softmax", masked, out=NOTANUMBER)
    masks.loss(softmax)
    graph = masks.graph()
    found = recognise(graph, origins(graph)[0])
    assert (found.cause, found.seq) == (Cause.ALL_MASKED_SOFTMAX, softmax)


REDUCED = {"group_size": 2, "rank": 0, "reduce": "sum"}


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD])
def test_what_was_finite_when_it_was_sent_came_from_another_rank(phase: Phase) -> None:
    step = Step()
    sent = step.op("mm", step.entry())
    back = step.op("c10d.allreduce_.default", Part(sent, span=FINE), out=NOTANUMBER, scalars=REDUCED, phase=phase)
    step.gradient(step.op("copy_", back, out=NOTANUMBER))
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    assert (found.cause, found.seq) == (Cause.RECEIVED, back)
    assert found.reason == FromOthers(ranks=2, sender=None, sums=True, dtype="float16")


def test_what_was_not_finite_when_it_was_sent_began_here() -> None:
    step = Step()
    sent = step.op("mm", step.entry(), out=OVERFLOWN)
    back = step.op("c10d.allreduce_.default", Part(sent, span=OVERFLOWN), out=OVERFLOWN, scalars=REDUCED)
    step.gradient(back)
    assert [origin.seq for origin in origins(step.graph())] == [sent]


def test_of_what_each_rank_sent_the_one_is_named_whose_part_is_bad() -> None:
    step = Step()
    facts = {"group_size": 2, "rank": 0, "ranks": [4, 6]}
    gather, dtypes = "c10d.allgather_.default", ("float16", "float16")
    parts = step.op(gather, step.entry(), more=(NOTANUMBER,), scalars=facts, out_dtypes=dtypes)
    step.loss(step.op("cat", Part(parts), Part(parts, out=1), out=NOTANUMBER))
    graph = step.graph()
    reason = recognise(graph, origins(graph)[0]).reason
    assert reason == FromOthers(ranks=2, sender=6, sums=False, dtype="float16")


def test_a_result_that_unseen_code_took_on_is_no_fault_of_the_device() -> None:
    step = Step()
    bucket = step.op("copy_", step.entry())
    exchange = step.op("c10d.allreduce_.default", Part(bucket, span=FINE), out=(None, None), scalars=REDUCED)
    step.gradient(step.op("copy_", bucket, out=NOTANUMBER, phase=Phase.LOSS))
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    assert (found.cause, found.seq) == (Cause.RECEIVED, exchange)
    assert isinstance(found.reason, FromOthers)
    assert found.reason.unseen


@pytest.mark.parametrize(
    "op", ["relu", "max_pool2d_with_indices", "cat", "embedding", "clamp_min", "index.Tensor", "_to_copy"]
)
def test_an_op_that_only_carries_values_points_at_whoever_wrote_them(op: str) -> None:
    step = Step()
    product = step.op("mm", step.entry())
    step.loss(step.op(op, product, out=NOTANUMBER))
    assert named(step) == (Cause.HARDWARE_TRANSIENT, Phase.FORWARD, "aten.mm.default")


# -- the optimizer --------------------------------------------------------------------------------------------------


def _update(step: Step, dtype: str, eps: float) -> None:
    """Adam's denominator: sqrt(v) + eps, with v flushed to zero."""
    columns: dict[str, Any] = {"dtype": dtype, "phase": Phase.OPTIMIZER}
    weight, gradient = step.entry(Node.PARAMETER, "w", dtype=dtype), step.entry(dtype=dtype)
    variance = step.op(
        "addcmul_", gradient, gradient, gradient, out=ZERO, zeros=64, scalars={"value": 0.001}, **columns
    )
    root = step.op("sqrt", variance, out=ZERO, zeros=64, **columns)
    denominator = step.op(
        "add_.Tensor", Part(root, in_place=True), out=ZERO, zeros=64, scalars={"other": eps}, **columns
    )
    operands = (Part(weight, in_place=True), gradient, denominator)
    update = step.op("addcdiv_", *operands, out=OVERFLOWN, scalars={"value": -0.001}, **columns)
    step.sink(update, Node.WEIGHT_AFTER, "w")


@pytest.mark.parametrize(
    ("dtype", "eps", "cause"),
    [
        (HALF, 1e-8, Cause.EPS_UNDERFLOW),
        (HALF, 1e-3, Cause.HALF_PARAMS),
        (BF16, 1e-8, Cause.HALF_PARAMS),
        (FULL, 0.0, Cause.DIV_ZERO),
    ],
)
def test_an_update_that_is_not_finite(dtype: str, eps: float, cause: Cause) -> None:
    step = Step()
    _update(step, dtype, eps)
    assert named(step) == (cause, Phase.OPTIMIZER, "aten.addcdiv_.default")


@pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
def test_an_update_divided_by_a_norm_of_zeros_is_a_division_by_zero_in_any_dtype(dtype: str) -> None:
    step = Step()
    columns: dict[str, Any] = {"dtype": dtype, "phase": Phase.OPTIMIZER}
    weight = step.entry(Node.PARAMETER, "w", dtype=dtype)
    gradient = step.entry(dtype=dtype, out=ZERO, zeros=64)
    norm = step.op("linalg_vector_norm", gradient, out=ZERO, zeros=1, shape="", **columns)
    ratio = step.op("div.Tensor", weight, norm, out=OVERFLOWN, **columns)
    update = step.op("mul_.Tensor", Part(weight, in_place=True), ratio, out=OVERFLOWN, **columns)
    step.sink(update, Node.WEIGHT_AFTER, "w")
    assert named(step)[0] is Cause.DIV_ZERO


def test_a_small_learning_rate_is_not_taken_for_an_eps() -> None:
    step = Step()
    columns: dict[str, Any] = {"dtype": HALF, "phase": Phase.OPTIMIZER}
    weight = step.entry(Node.PARAMETER, "w")
    operands = (Part(weight, in_place=True), step.entry(), step.entry(out=POSITIVE))
    update = step.op("addcdiv_", *operands, out=OVERFLOWN, scalars={"value": -1e-9}, **columns)
    step.sink(update, Node.WEIGHT_AFTER, "w")
    assert named(step)[0] is Cause.HALF_PARAMS


# -- the first overflow of a step that runs away --------------------------------------------------------------------


def test_the_first_overflow_of_a_step_is_found_whether_or_not_it_matters() -> None:
    step = Step()
    x = step.entry()
    step.op("masked_fill.Scalar", x, out=MASKED, scalars={"value": -INF}, module="attention")
    first = step.op("mm", x, out=OVERFLOWN)
    step.op("mm", first, out=NOTANUMBER)
    step.op("exp", x, out=OVERFLOWN)
    found = first_overflow(step.graph())
    assert isinstance(found, Recognised)
    assert (found.seq, found.cause) == (first, Cause.FP16_OVERFLOW)


def test_a_step_without_an_overflow_has_none() -> None:
    step = Step()
    x = step.entry()
    step.op("log", x, out=MASKED)
    step.backward("mm", x, out=OVERFLOWN)
    assert first_overflow(step.graph()) is None


def test_a_cast_that_autocast_inserted_overflows_as_well() -> None:
    step = Step()
    x = step.entry(dtype=FULL, out=(0.0, 1e5))
    step.loss(step.op("_to_copy", x, out=(0.0, INF), cast=Cast.AUTOCAST))
    assert named(step) == (Cause.FP16_OVERFLOW, Phase.FORWARD, "aten._to_copy.default")


def test_what_was_not_measured_is_named() -> None:
    step = Step()
    unknown = step.entry(out=(None, None), dtype="qint8")
    step.loss(step.op("mul.Tensor", step.entry(dtype=FULL), unknown, out=NOTANUMBER, dtype=FULL))
    graph = step.graph()
    found = recognise(graph, origins(graph)[0])
    said = explanation(found.cause, Occurrence(op="aten.mul.Tensor", reason=found.reason))
    assert said == (
        "mul made a non-finite value, and why cannot be told: its operand 1 (qint8 8x8) was not measured, for AMPscope "
        "does not look into qint8."
    )
