"""Where two executions of one step part, and in what: two small steps, written op by op."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from ampscope.provenance import Graph, How, Parting, parting
from ampscope.trace.schema import EdgeRow, Node, OpRow, Phase, SiteRow, Statistics

N, NAN = 64, float("nan")


class Op(NamedTuple):
    """An op of some elements, at the program point of its position or another one."""

    op: str
    reads: tuple[int, ...] = ()
    span: tuple[float, float] | None = (-1.0, 1.0)
    checksum: int | None = None
    numel: int = N
    point: int | None = None
    in_place: bool = False  #: it overwrites its first operand
    partial: bool = False  #: what it reads is not all that was written, or more


def step(*ops: Op) -> Graph:
    points = [op.point if op.point is not None else n for n, op in enumerate(ops)]
    sites = {point: _site(point, op) for point, op in zip(points, ops, strict=True)}
    rows = [
        OpRow(0, "live", n, 0, point, 0, op.numel, op.checksum, Statistics(*(op.span or ())))
        for n, (op, point) in enumerate(zip(ops, points, strict=True))
    ]
    edges = [
        EdgeRow(0, "live", n, arg, read, 0, op.in_place and not arg, op.partial, None, None)
        for n, op in enumerate(ops)
        for arg, read in enumerate(op.reads)
    ]
    return Graph(rows, edges, sites.__getitem__)


def _site(number: int, op: Op) -> SiteRow:
    name = op.op if op.op in list(Node) else f"aten.{op.op}.default"
    shapes = tuple(str(N) for _ in op.reads)
    return SiteRow(
        number, name, "", "part", "Part", Phase.FORWARD, "a.py", 1, "f", "", (), shapes, (), (), "{}", "", "", "", None
    )


X = Op(Node.INPUT, checksum=7)
W = Op(Node.PARAMETER, checksum=8)
DRAWN = Op("native_dropout", (0,), checksum=9)
PRODUCT = Op("mm", (0, 1))
WENT_WRONG = Op("mm", (0, 1), span=(NAN, NAN))


def ends(*ops: Op) -> tuple[Graph, int]:
    return step(*ops), len(ops) - 1


def test_a_result_alone_that_is_another_is_the_proof() -> None:
    real, last = ends(X, W, WENT_WRONG)
    assert parting(real, step(X, W, PRODUCT), last) == Parting(2, How.RESULT)


def test_executions_that_are_the_same_part_nowhere() -> None:
    real, last = ends(X, W, WENT_WRONG)
    assert parting(real, real, last) is None


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        pytest.param((X._replace(checksum=6), W, PRODUCT), Parting(0, How.GIVEN), id="another batch"),
        pytest.param((X, W._replace(checksum=6), PRODUCT), Parting(1, How.GIVEN), id="another weight"),
        pytest.param((X, W, PRODUCT._replace(point=9)), Parting(2, How.CALLS), id="another number in the call"),
        pytest.param((X, W, PRODUCT._replace(reads=(0, 0))), Parting(2, How.CALLS), id="other operands"),
        pytest.param((X, W, PRODUCT._replace(numel=8)), Parting(2, How.CALLS), id="another size"),
        pytest.param((X, W, PRODUCT._replace(span=None)), Parting(2, How.UNMEASURED), id="not measured"),
    ],
)
def test_what_else_was_not_the_same(again: tuple[Op, ...], expected: Parting) -> None:
    real, last = ends(X, W, WENT_WRONG)
    assert parting(real, step(*again), last) == expected


def test_inputs_without_a_checksum_prove_nothing() -> None:
    unknown = X._replace(checksum=None)
    real, last = ends(unknown, W, WENT_WRONG)
    assert parting(real, step(unknown, W, PRODUCT), last) == Parting(0, How.UNMEASURED)


def test_random_numbers_that_are_others_prove_nothing() -> None:
    bad = Op("exp", (1,), span=(0.0, NAN))
    real, last = ends(X, DRAWN, bad)
    again = step(X, DRAWN._replace(checksum=1), bad._replace(span=(0.0, 1.0)))
    assert parting(real, again, last) == Parting(1, How.DRAWN)


def test_other_digits_are_roundings_and_another_size_is_not() -> None:
    real, last = ends(X, W, PRODUCT._replace(span=(-1.0, 1.25)), Op("exp", (2,), span=(0.0, NAN)))
    for size, how in ((1.0, How.DIGITS), (0.25, How.RESULT)):
        again = step(X, W, PRODUCT._replace(span=(-size, size)), Op("exp", (2,)))
        assert parting(real, again, last) == Parting(2, how)


@pytest.mark.parametrize(("first", "how"), [("zeros", How.RESULT), ("slice", How.UNMEASURED)])
def test_memory_that_nobody_wrote_is_no_operand_that_is_known(first: str, how: How) -> None:
    """A buffer filled in part: a reader of all of it reads what others left, unless all was written before."""
    made = Op(first, numel=N if first == "zeros" else N // 2)
    part = Op("copy_", (0, 1), numel=N // 2, in_place=True)
    read = Op("relu", (2,), span=(NAN, NAN), partial=True)
    real, last = ends(made, X, part, read)
    again = step(made, X, part, read._replace(span=(0.0, 1.0)))
    assert parting(real, again, last) == Parting(3, how)


def test_what_led_to_no_loss_is_not_asked_for_in_the_second_run() -> None:
    """The loop also ran the model for a metric, at the same program points."""
    metric = Op("mm", (0, 1), point=9)
    real, last = ends(X, W, metric, metric._replace(span=(NAN, NAN)), Op(Node.LOSS, (3,)))
    assert parting(real, step(X, W, metric, Op(Node.LOSS, (2,), point=4)), last - 1) == Parting(3, How.RESULT)
