from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.errors import RunDamaged
from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from ampscope.trace.write.resume import ResumePoint, resume_point
from tests.support.trace_builder import START, TraceBuilder


def first_segment(folder: Path) -> TraceBuilder:
    builder = TraceBuilder(folder)
    for _ in range(3):
        builder.step()
    builder.step(optimizer=1)
    for name in ("fc.weight", "fc.bias"):
        builder.param(name)
    builder.site()
    builder.scaler_event(scaler=1)
    builder.event()
    return builder


AFTER_FIRST = ResumePoint(
    segment=1,
    next_step={0: 3, 1: 1},
    next_site=1,
    params={"fc.weight": 0, "fc.bias": 1},
    next_param=2,
    next_scaler=2,
)


def test_a_fresh_folder_starts_at_zero(tmp_path: Path) -> None:
    assert resume_point(tmp_path / "run") == ResumePoint() == resume_point(tmp_path)


def test_from_sealed_parts(run_folder: Path) -> None:
    first_segment(run_folder).close()
    assert resume_point(run_folder) == AFTER_FIRST


def test_from_journals(run_folder: Path) -> None:
    builder = first_segment(run_folder)
    builder.leave_open()
    assert resume_point(run_folder) == AFTER_FIRST
    builder.close()


def test_the_writer_knows_it_too(run_folder: Path) -> None:
    first_segment(run_folder).close()
    builder = TraceBuilder(run_folder)
    assert builder.writer.resume == AFTER_FIRST
    builder.close()


def test_another_rank_counts_its_own(run_folder: Path) -> None:
    first_segment(run_folder).close()
    assert resume_point(run_folder, rank=1) == ResumePoint()
    builder = TraceBuilder(run_folder, rank=1)
    builder.event()
    builder.step(step=7)
    builder.close()
    assert resume_point(run_folder, rank=1) == ResumePoint(segment=1, next_step={0: 8})
    assert read_manifest(run_folder).segments[1:] == ()


def test_a_second_segment_goes_on_in_the_same_folder(run_folder: Path) -> None:
    first_segment(run_folder).close()
    before = read_manifest(run_folder)
    builder = TraceBuilder(run_folder, created=START + 99, model="Wider")
    builder.step()
    builder.leave_open()
    during = read_manifest(run_folder)
    assert before.closed is not None
    assert during.closed is None
    assert during.created == before.created == START
    assert during.segments[:1] == before.segments
    assert len(during.segments) == 2
    assert during.model == "Wider"
    builder.close()
    assert sorted(list_table(table_folder(run_folder, 0, Table.STEPS)).parts) == [0, 1]
    with open_run(run_folder) as run:
        assert [(row.step, row.segment) for row in run.rows(Table.STEPS, optimizer=0)] == [
            (0, 0),
            (1, 0),
            (2, 0),
            (3, 1),
        ]


def test_numbers_go_on_after_the_highest_though_parts_are_gone(run_folder: Path) -> None:
    folder = table_folder(run_folder, 0, Table.STEPS)
    for _ in range(3):
        builder = TraceBuilder(run_folder)
        builder.step()
        builder.close()
    (folder / "part-000000.parquet").unlink()
    builder = TraceBuilder(run_folder)
    builder.step()
    builder.close()
    assert sorted(list_table(folder).parts) == [1, 2, 3]


def test_a_damaged_part_is_named(run_folder: Path) -> None:
    first_segment(run_folder).close()
    part = table_folder(run_folder, 0, Table.STEPS) / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(RunDamaged, match=r"steps/part-000000\.parquet.*Move it away"):
        resume_point(run_folder)
    with pytest.raises(RunDamaged):
        TraceBuilder(run_folder)
    part.unlink()
    TraceBuilder(run_folder).close()  # and the lock was given back
