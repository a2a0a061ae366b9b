"""Rows that come as columns are written as the same rows would be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ampscope
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.files.journal import to_batch
from ampscope.trace.manifest import Manifest
from ampscope.trace.schema import EdgeRow, OpRow, Statistics, Table
from ampscope.trace.write.writer import TraceWriter

OPS = [
    OpRow(7, "live", 0, 0, 3, 0, 12, -5, Statistics(-1.5, 2.5)),
    OpRow(7, "live", 0, 1, 3, 0, 1, None, Statistics(float("-inf"), float("inf"))),
    OpRow(7, "live", 1, 0, 4, 1, 1 << 40),
]
BLOCK = ColumnBlock(
    3,
    {
        "step": 7,
        "source": "live",
        "seq": np.array([0, 0, 1]),
        "out": np.array([0, 1, 0]),
        "site": np.array([3, 3, 4]),
        "micro_batch": np.array([0, 0, 1]),
        "numel": np.array([12, 1, 1 << 40]),
        "checksum": np.array([-5, 0, 0]),
        "min": np.array([-1.5, -np.inf, np.nan]),
        "max": np.array([2.5, np.inf, np.nan]),
    },
    {
        "checksum": np.array([True, False, False]),
        "min": np.array([True, True, False]),
        "max": np.array([True, True, False]),
    },
)


def with_column(name: str, values: Any) -> ColumnBlock:
    return replace(BLOCK, columns={**BLOCK.columns, name: values})


def test_columns_are_the_rows() -> None:
    assert BLOCK.to_batch(Table.OPS).equals(to_batch(Table.OPS, OPS))
    assert len(BLOCK) == len(OPS)


def test_lists_are_written_as_lists_and_rows_are_chosen() -> None:
    counts = np.full(3, None, object)
    counts[1] = (4, 0, 2)
    block = with_column("exp_counts", counts)
    rows = [OPS[0], OPS[1]._replace(statistics=OPS[1].statistics._replace(exp_counts=(4, 0, 2))), OPS[2]]
    assert block.to_batch(Table.OPS).equals(to_batch(Table.OPS, rows))
    assert block.where(np.array([False, True, False])).to_batch(Table.OPS).equals(to_batch(Table.OPS, rows[1:2]))


def test_flags_are_written_as_flags() -> None:
    numbers: dict[str, Any] = {
        "seq": np.array([4, 5]),
        "arg": np.array([0, 1]),
        "from_seq": np.array([2, 3]),
        "from_out": 0,
    }
    flags = {"in_place": np.array([True, False]), "partial": np.array([False, False])}
    block = ColumnBlock(2, {"step": 7, "source": "live", **numbers, **flags})
    rows = [
        EdgeRow(7, "live", 4, 0, 2, 0, True, False, None, None),
        EdgeRow(7, "live", 5, 1, 3, 0, False, False, None, None),
    ]
    assert block.to_batch(Table.EDGES).equals(to_batch(Table.EDGES, rows))


def test_a_block_without_rows_is_one() -> None:
    empty = {name: value if isinstance(value, (str, int)) else value[:0] for name, value in BLOCK.columns.items()}
    assert ColumnBlock(0, empty).to_batch(Table.OPS).num_rows == 0


def test_an_integer_that_does_not_fit_is_refused_and_only_its_row_left_out() -> None:
    wide = with_column("micro_batch", np.array([0, 1 << 15, 1]))
    with pytest.raises(OverflowError, match="32768"):
        wide.to_batch(Table.OPS)
    assert wide.fitting(Table.OPS).to_batch(Table.OPS).equals(to_batch(Table.OPS, [OPS[0], OPS[2]]))


def test_a_missing_column_that_must_not_be_null_is_refused() -> None:
    bare = {name: value for name, value in BLOCK.columns.items() if name != "numel"}
    with pytest.raises(ValueError, match="numel"):
        ColumnBlock(3, bare).to_batch(Table.OPS)


def test_a_writer_takes_both_and_tells_of_what_does_not_fit(tmp_path: Path) -> None:
    told: list[str] = []
    with TraceWriter(tmp_path / "run", manifest=Manifest(), on_notice=told.append) as trace:
        trace.put(Table.OPS, OPS)
        assert trace.flush()
        trace.put(Table.OPS, BLOCK)
        trace.put(Table.OPS, with_column("out", np.array([0, 1 << 15, 0])))
        assert trace.flush()
        assert not trace.waits(Table.OPS)
    written = ampscope.open_run(tmp_path / "run").rows(Table.OPS)
    assert sorted(map(str, written)) == sorted(map(str, [*OPS, *OPS, OPS[0], OPS[2]._replace(out=0)]))
    assert len(told) == 1
    assert "32768" in told[0]
