from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from ampscope.trace.files.arrow_arrays import to_array
from ampscope.trace.schema import Table, arrow_schema

CASES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int16(), [-(2**15), 2**15 - 1, None, 0]),
    (pa.int32(), [-(2**31), 2**31 - 1, None]),
    (pa.int64(), [-(2**63), 2**63 - 1, None]),
    (pa.float32(), [-0.0, 0.5, math.inf, None, 2.0**-149]),
    (pa.float64(), [1e308, 5e-324, -math.inf, None]),
    (pa.bool_(), [True, False, None] * 7),
    (pa.string(), ["", "a", None, "\u03b1\u03b2", "\x00", "\U0001f600"]),
    (pa.list_(pa.string()), [("a", ""), (), None, ("\u00e9",)]),
    (pa.list_(pa.int64()), [(1, 2, 3), None, (), (2**62,)]),
    (pa.list_(pa.float32()), [(1.5, -0.25), None, (), (2.0**-140,)]),
    (pa.list_(pa.int32()), [(1, 2, 3), None, (), (2**31 - 1,)]),
]


@pytest.mark.parametrize(("kind", "values"), CASES, ids=[str(kind) for kind, _ in CASES])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 100])
def test_the_same_as_pyarrow_makes(kind: pa.DataType, values: list[Any], size: int) -> None:
    values = values if size == 100 else values[:size]
    made = to_array(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))
    assert made.null_count == sum(value is None for value in values)


def test_every_type_of_the_schema_is_among_them() -> None:
    used = {field.type for table in Table for field in arrow_schema(table)}
    assert used == {kind for kind, _ in CASES}


def test_not_a_number_is_a_number() -> None:
    made = to_array([math.nan, None], pa.float32())
    assert made.null_count == 1
    assert math.isnan(made[0].as_py())


def test_too_large_for_a_single_is_infinite() -> None:
    assert to_array([1e300], pa.float32()).to_pylist() == [math.inf]


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (pa.int64(), 1.5, TypeError),
        (pa.int64(), "1", TypeError),
        (pa.int16(), 2**15, OverflowError),
        (pa.float64(), "1", TypeError),
        (pa.string(), 1, TypeError),
        (pa.string(), "\udcff", ValueError),
        (pa.list_(pa.string()), ("a", 1), TypeError),
        (pa.list_(pa.int64()), 3, TypeError),
    ],
)
def test_misfits(kind: pa.DataType, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        to_array([value], kind)
