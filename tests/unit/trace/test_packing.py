"""Packing: neighbours with the same columns, in order, as many as fit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from ampscope.trace.joined_parts import MOST_BULK_ROWS, MOST_BYTES, MOST_DECODED, MOST_ROWS, Packed, packed
from ampscope.trace.schema import Table

COLUMNS = pa.schema([("step", pa.int64())])
OLDER = pa.schema([("step", pa.int64()), ("loss", pa.float64())])


def sizes(files: list[Packed], table: Table = Table.STEPS) -> list[int]:
    groups = list(packed(files, table))
    assert [each for group in groups for each in group] == files, "all of them, in order"
    return [len(group) for group in groups]


@pytest.mark.parametrize(
    ("table", "amount", "most"),
    [
        (Table.STEPS, "rows", MOST_ROWS),
        (Table.OPS, "rows", MOST_BULK_ROWS),
        (Table.OPS, "size", MOST_BYTES),
        (Table.STEPS, "decoded", MOST_DECODED),
    ],
)
def test_as_many_as_fit(table: Table, amount: str, most: int) -> None:
    files = [Packed(path=Path(str(n)), columns=COLUMNS, **{amount: 1 + (n * most // 7) % most}) for n in range(40)]
    groups = list(packed(files, table))
    sums = [sum(getattr(each, amount) for each in group) for group in groups]
    assert all(each <= most for each in sums)
    assert all(one + two > most for one, two in pairwise(sums))
    assert len(groups) <= 1 + 2 * sum(sums) / most


def test_only_with_the_same_columns() -> None:
    files = [Packed(path=Path(str(n)), rows=1, columns=OLDER if n < 3 else COLUMNS) for n in range(5)]
    assert sizes(files) == [3, 2]


def test_not_over_what_has_to_stay() -> None:
    files = [Packed(path=Path(str(n)), rows=1, columns=None if n in {2, 3} else COLUMNS) for n in range(6)]
    assert sizes(files) == [2, 1, 1, 2]


def test_one_that_is_larger_than_one_may_be_stays() -> None:
    files = [Packed(path=Path(str(n)), rows=MOST_ROWS + 1, columns=COLUMNS) for n in range(2)]
    assert sizes(files) == [1, 1]
    assert sizes([]) == []
