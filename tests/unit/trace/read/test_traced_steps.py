"""What was traced is told by the footers of parts, and counted where they do not tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampscope.analysis.tables.traced_steps import TracedStep, traced_steps
from ampscope.trace.files import parquet_part
from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.files.parquet_part import KEY, ExecutionRows, read_index
from ampscope.trace.read.run import open_run
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import Source, Table
from ampscope.trace.write.writing_threads import SealAt
from tests.support.trace_builder import TraceBuilder

#: Of each step, how many rows of a live trace and of a replay.
STEPS = {0: (3, 0), 2: (2, 4), 5: (1, 0)}
TRACED = tuple(
    TracedStep(rank=0, step=step, source=source, rows=rows)
    for step, counts in reversed(STEPS.items())
    for source, rows in zip((Source.LIVE, Source.REPLAY), counts, strict=True)
    if rows
)
ROWS = {ExecutionRows(one.step, one.source, one.rows) for one in TRACED}


@pytest.fixture
def builder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> TraceBuilder:
    """A run of which steps are torn apart between parts, the last of them still in a journal."""
    monkeypatch.setattr("ampscope.trace.write.writer._seal_at", lambda _: SealAt(rows=4))
    builder = TraceBuilder(run_folder)
    for step, counts in STEPS.items():
        for source, rows in zip((Source.LIVE, Source.REPLAY), counts, strict=True):
            for _ in range(rows):
                builder.op(step=step, source=source)
                assert builder.writer.flush()
    return builder


def parts(run: Path) -> list[Path]:
    return list(list_table(table_folder(run, 0, Table.OPS)).parts.values())


def without_index(part: Path, metadata: Mapping[str, str] | None = None) -> None:
    """A part as an older AMPscope wrote it, or with something else in its footer."""
    rows = pq.read_table(part)
    with pq.ParquetWriter(part, rows.schema) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata(dict(metadata or {}))


def test_the_parts_tell_it(builder: TraceBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = builder.close()
    assert len(parts(run_folder)) > 2
    with open_run(run_folder) as run:
        monkeypatch.setattr("ampscope.trace.read.table_scan.bound", None)  # no part is read
        assert traced_steps(run) == TRACED
        assert set(run.traced(0)) == ROWS


def test_rows_in_journals_are_counted(builder: TraceBuilder) -> None:
    with open_run(builder.leave_open()) as run:
        assert traced_steps(run) == TRACED
        builder.op(step=9, source=Source.LIVE)
        builder.leave_open()
        assert traced_steps(run) == (TracedStep(rank=0, step=9, source=Source.LIVE, rows=1), *TRACED)
    builder.close()


@pytest.mark.parametrize(
    "index",
    [
        None,
        "",
        "[]",
        "[[0]]",
        "{}",
        "7",
        '[[0,"live",1000]]',
        '[[0,"live",true],[0,"replay",3]]',
        '[[0.5,"live",4]]',
        "[[0,1,4]]",
        '[[0,"live",5],[0,"live",-1]]',
        "[" * 5000,
        "\x00",
    ],
)
def test_a_part_that_does_not_tell_it_is_counted(index: str | None, builder: TraceBuilder) -> None:
    run_folder = builder.close()
    for part in parts(run_folder)[::2]:
        without_index(part, {} if index is None else {KEY: index})
    with open_run(run_folder) as run:
        assert traced_steps(run) == TRACED


def test_a_part_of_too_many_steps_has_no_index(builder: TraceBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = builder.close()
    rows = pa.concat_tables([pq.read_table(part) for part in parts(run_folder)])
    told = parquet_part.index_of(rows)
    metadata = {KEY.encode(): told.encode()}
    assert len(json.loads(told)) == len(TRACED)
    assert set(read_index(metadata, rows.num_rows) or ()) == ROWS
    assert read_index(metadata, rows.num_rows + 1) is None
    monkeypatch.setattr(parquet_part, "MOST_STEPS", len(TRACED) - 1)
    assert parquet_part.index_of(rows) == ""


def test_a_part_deleted_by_the_budget_is_told_of_no_more(
    builder: TraceBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = builder.close()
    first, *_ = parts(run_folder)
    real = Scan._sealed

    def late(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        first.unlink(missing_ok=True)
        return found

    without_index(first)
    monkeypatch.setattr(Scan, "_sealed", late)
    with open_run(run_folder) as run:
        assert sum(each.rows for each in run.traced(0)) == sum(each.rows for each in TRACED) - 4
