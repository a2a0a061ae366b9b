"""How rows become a Parquet file: nothing of them is lost, and measured values take few bytes."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.journal import to_batch
from ampscope.trace.files.parquet_part import write_part
from ampscope.trace.schema import OpRow, Statistics, StepRow, Table


def step(number: int) -> StepRow:
    chance = random.Random(number)
    loss = (math.nan, math.inf, None, chance.random())[number % 4]
    return StepRow(number, 0, 0, 1.7e9 + number, loss, 2.0**16, number, None, False, 0.1, 1e-3, 1, 0.5, 0.01, "")


def op(number: int) -> OpRow:
    chance = random.Random(number)
    low, high = -chance.random(), chance.random()
    counts = (1, 2, 3) if number % 7 == 0 else None
    return OpRow(number // 100, "live", number % 100, 0, 0, 0, 8, statistics=Statistics(low, high, exp_counts=counts))


def written(table: Table, rows: list[StepRow] | list[OpRow], path: Path) -> tuple[pa.Table, pa.Table]:
    """What was written, and what is read again."""
    before = pa.Table.from_batches([to_batch(table, rows)])
    write_part(before, path)
    with path.open("rb") as file:
        return before, pq.ParquetFile(file).read()


def test_every_value_is_read_again(tmp_path: Path) -> None:
    before, after = written(Table.STEPS, [step(number) for number in range(1000)], tmp_path / "steps.parquet")
    assert after.schema == before.schema
    assert repr(after.to_pydict()) == repr(before.to_pydict())  # as text, not a number equals itself
    before, after = written(Table.OPS, [op(number) for number in range(1000)], tmp_path / "ops.parquet")
    assert repr(after.to_pydict()) == repr(before.to_pydict())


def test_a_measured_op_takes_eight_bytes_at_most(tmp_path: Path) -> None:
    path = tmp_path / "ops.parquet"
    written(Table.OPS, [op(number)._replace(checksum=None) for number in range(50_000)], path)
    assert path.stat().st_size < 8 * 50_000


def test_an_empty_table_is_a_part(tmp_path: Path) -> None:
    before, after = written(Table.STEPS, [], tmp_path / "steps.parquet")
    assert after.equals(before)
