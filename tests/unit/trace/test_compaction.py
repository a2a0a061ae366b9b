"""Compaction: fewer files, the same rows to the last bit, for readers before, during and after."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampscope.trace import joined_parts
from ampscope.trace.compaction import compact
from ampscope.trace.files import parquet_part
from ampscope.trace.files.folder_lock import LOCK_FILE
from ampscope.trace.files.layout import list_table, span_of, table_folder
from ampscope.trace.joined_parts import is_same
from ampscope.trace.location import location
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read import sealed_parts
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import BULK_TABLES, MANIFEST, SCHEMA_VERSION, Table
from tests.support.trace_builder import TraceBuilder
from tests.unit.trace.many_parts import age, files_of, in_older_columns, many_parts, raw_rows, what_is_read


def compacted(folder: Path, **asked: Any) -> Any:
    (run,) = compact([folder], **{"age": 0.0, **asked}).runs
    return run


class TestRowsStay:
    @pytest.mark.parametrize("seed", range(3))
    def test_of_every_table(self, seed: int, run_folder: Path) -> None:
        many_parts(run_folder, seed=seed, ranks=1 + seed, segments=4 - seed)
        before = what_is_read(run_folder)
        done = compacted(run_folder)
        assert what_is_read(run_folder) == before
        assert done.before.files >= 2 * done.after.files
        assert done.after.bytes < done.before.bytes
        assert done.after.files == len(files_of(run_folder))
        assert done.left_alone == ()

    def test_to_the_last_bit_and_in_order(self, run_folder: Path) -> None:
        many_parts(run_folder)
        before = {table: raw_rows(run_folder, 0, table) for table in Table}
        compacted(run_folder)
        for table, parts in before.items():
            if parts and table is not Table.EVENTS:  # which had a journal, too
                (after,) = raw_rows(run_folder, 0, table)
                assert is_same(after, pa.concat_tables(parts))

    @pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (math.nan, None), (1.0, 1.0 + 2**-23)])
    def test_what_is_not_the_same_is_seen(self, value: float, other: float | None) -> None:
        for kind in (pa.float32(), pa.list_(pa.float32())):
            one, two = ([each] if pa.types.is_list(kind) else each for each in (value, other))
            tables = [pa.table({"a": pa.array([each], kind)}) for each in (one, one, two)]
            assert is_same(tables[0], tables[1])
            assert not is_same(tables[0], tables[2])

    def test_a_disk_that_does_not_keep_what_it_is_given(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        many_parts(run_folder)
        before = what_is_read(run_folder)
        write = parquet_part.write_part
        monkeypatch.setattr(joined_parts, "write_part", lambda rows, path: write(rows.slice(1), path))
        done = compacted(run_folder)
        assert "not what was written" in done.left_alone[0].why
        assert done.left_alone[0].failed
        assert what_is_read(run_folder) == before
        assert not list(run_folder.rglob("*.tmp"))

    def test_of_parts_of_other_versions(self, run_folder: Path) -> None:
        """Parts that lack columns are merged with their like, and lack them still."""
        many_parts(run_folder, ranks=1, segments=6)
        for part in (0, 1, 2):
            in_older_columns(run_folder, Table.STEPS, "averaged", part=part)
            in_older_columns(run_folder, Table.INCIDENTS, "bad_params", "over_budget", part=part)
        before = what_is_read(run_folder)
        done = compacted(run_folder)
        assert what_is_read(run_folder) == before
        steps = list_table(table_folder(run_folder, 0, Table.STEPS)).parts
        assert [span_of(part)[:2] for part in steps.values()] == [(0, 2), (3, 5)]
        assert "averaged" not in pq.read_schema(steps[0]).names
        assert done.left_alone == ()

    def test_a_run_of_an_older_version_is_named_as_one_of_todays(self, run_folder: Path) -> None:
        """A reader of version 2 would pass over merged parts."""
        many_parts(run_folder)
        path = run_folder / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
        assert compacted(run_folder).merged
        assert read_manifest(run_folder).schema == SCHEMA_VERSION

    def test_an_older_run_with_nothing_to_merge_stays_of_its_version(self, run_folder: Path) -> None:
        trace = TraceBuilder(run_folder)
        trace.step()
        trace.close()
        path = run_folder / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
        assert compacted(run_folder).merged == 0
        assert read_manifest(run_folder).schema == 2

    def test_saved_operands_and_what_else_lies_there(self, run_folder: Path) -> None:
        many_parts(run_folder)
        others = [run_folder / "rank=0" / "tensors" / "step=000001-seq=000002.safetensors", run_folder / "notes.txt"]
        others += [run_folder / "rank=0" / "steps" / "of mine.parquet"]
        for path in others:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"as it was")
        compacted(run_folder)
        assert [path.read_bytes() for path in others] == [b"as it was"] * 3

    def test_a_run_that_goes_on_after_it(self, run_folder: Path) -> None:
        many_parts(run_folder, ranks=1)
        with open_run(run_folder) as run:
            before = [row.step for row in run.rows(Table.STEPS)]
        compacted(run_folder)
        trace = TraceBuilder(run_folder)
        added = trace.step().step
        trace.close()
        with open_run(run_folder) as run:
            assert [row.step for row in run.rows(Table.STEPS)] == [*before, added]
        compacted(run_folder)
        with open_run(run_folder) as run:
            assert [row.step for row in run.rows(Table.STEPS)] == [*before, added]
        assert len(list_table(table_folder(run_folder, 0, Table.STEPS)).parts) == 1

    def test_a_run_looks_no_younger(self, run_folder: Path) -> None:
        many_parts(run_folder)
        age(run_folder)
        newest = max(path.stat().st_mtime_ns for path in run_folder.glob("rank=*/*/*"))
        compacted(run_folder)
        assert max(path.stat().st_mtime_ns for path in run_folder.glob("rank=*/*/*")) == newest


class TestReaders:
    def test_one_that_is_open_keeps_its_frames(self, run_folder: Path) -> None:
        many_parts(run_folder)
        with open_run(run_folder) as run:
            frames = [run._scan.relation(run._connection, table) for table in Table]  # as those of a large table
            lazy = [run.table(table) for table in Table]
            shown = [repr(frame.to_arrow_table().to_pylist()) for frame in frames]
            before = {table: repr(run.rows(table)) for table in Table}
            waited: list[float] = []

            def read_meanwhile(seconds: float) -> None:
                waited.append(seconds)
                assert [repr(frame.to_arrow_table().to_pylist()) for frame in frames] == shown
                assert [frame.collect().shape[0] for frame in lazy] == [text.count("'rank'") for text in shown]
                assert {table: repr(run.rows(table)) for table in Table} == before

            done = compacted(run_folder, age=60.0, waits=read_meanwhile)
            assert waited == [60.0]
            assert done.waiting > 0  # for time has not passed
            assert compacted(run_folder).waiting == 0
            assert {table: repr(run.rows(table)) for table in Table} == before
            assert len(files_of(run_folder)) == done.after.files - done.waiting

    def test_nobody_is_waited_for_where_nothing_was_merged(self, run_folder: Path) -> None:
        many_parts(run_folder)
        compacted(run_folder)
        assert compacted(run_folder, age=60.0, waits=_never).merged == 0

    def test_what_an_earlier_one_left_is_removed_at_once(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        many_parts(run_folder)
        left = compacted(run_folder, age=60.0, waits=lambda _: None)
        later = time.time() + 61.0
        monkeypatch.setattr(time, "time", lambda: later)
        done = compacted(run_folder, age=60.0, waits=_never)
        assert (done.waiting, done.after.files) == (0, left.after.files - left.waiting)


class TestBound:
    def test_two_neighbours_are_more_than_one_may_be(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        many_parts(run_folder, ranks=1, segments=8)
        before = what_is_read(run_folder)
        monkeypatch.setattr(joined_parts, "MOST_BULK_ROWS", most := before["counts"]["ops"][0] * 2 // 3)
        compacted(run_folder)
        assert what_is_read(run_folder) == before
        found = [rows.num_rows for rows in raw_rows(run_folder, 0, Table.OPS)]
        assert 1 < len(found) < 8
        assert all(one + two > most for one, two in pairwise(found))
        assert compacted(run_folder).merged == 0

    def test_bulk_tables_too(self, run_folder: Path) -> None:
        many_parts(run_folder)
        compacted(run_folder)
        for table in {*BULK_TABLES} - {Table.AUDIT_OPS}:
            assert len(list_table(table_folder(run_folder, 0, table)).parts) == 1

    def test_numbers_that_the_budget_has_taken_are_no_hindrance(self, run_folder: Path) -> None:
        many_parts(run_folder, ranks=1, segments=6)
        of = table_folder(run_folder, 0, Table.GRADS)
        for number in (1, 3):
            list_table(of).parts[number].unlink()
        before = what_is_read(run_folder)
        compacted(run_folder)
        assert what_is_read(run_folder) == before
        assert [part.name for part in list_table(of).parts.values()] == ["part-000000-000005.parquet"]

    def test_rows_that_a_reader_would_refuse_in_one_file(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        many_parts(run_folder, ranks=1, segments=7)
        refuse = sealed_parts.refuse_too_much

        def of_at_most_two(footer: pq.FileMetaData, size: int, table: Table, part: Path) -> None:
            span = span_of(part)
            if span.last - span.first > 1:
                raise ValueError("it declares more rows than are read")
            refuse(footer, size, table, part)

        monkeypatch.setattr(joined_parts, "refuse_too_much", of_at_most_two)
        before = what_is_read(run_folder)
        done = compacted(run_folder)
        assert what_is_read(run_folder) == before
        spans = [span_of(part) for part in list_table(table_folder(run_folder, 0, Table.STEPS)).parts.values()]
        assert all(span.last - span.first <= 1 for span in spans)
        assert len(spans) < 7
        assert done.left_alone == ()

    def test_where_there_is_nothing_to_do_nothing_is_touched(self, run_folder: Path) -> None:
        trace = TraceBuilder(run_folder)
        trace.step()
        trace.close()
        (run_folder / "rank=0" / LOCK_FILE).unlink()
        assert compacted(run_folder).left_alone == ()
        assert not (run_folder / "rank=0" / LOCK_FILE).exists()


class TestDryRun:
    def test_nothing_changes_and_the_files_are_foretold(self, run_folder: Path) -> None:
        many_parts(run_folder)
        before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
        planned = compacted(run_folder, dry_run=True, waits=_never)
        assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == before
        assert planned.after.bytes is None
        assert planned.after.files == compacted(run_folder).after.files

    def test_of_a_run_that_is_being_written(self, run_folder: Path) -> None:
        many_parts(run_folder)
        trace = TraceBuilder(run_folder)
        trace.leave_open()
        planned = compacted(run_folder, dry_run=True)
        trace.close()
        assert [Path(left.path).name for left in planned.left_alone][:1] == ["rank=0"]


class TestDamage:
    @pytest.mark.parametrize("damage", [lambda data: data[:-10], lambda data: b"", lambda data: data[:4] + data[40:]])
    def test_a_part_that_cannot_be_read_stays(self, damage: Callable[[bytes], bytes], run_folder: Path) -> None:
        many_parts(run_folder, ranks=1, segments=6)
        part = list_table(table_folder(run_folder, 0, Table.STEPS)).parts[3]
        damaged = damage(part.read_bytes())
        part.write_bytes(damaged)
        done = compacted(run_folder)
        assert part.read_bytes() == damaged
        (left,) = done.left_alone
        assert (left.path, left.failed) == (str(part), True)
        parts = list_table(table_folder(run_folder, 0, Table.STEPS)).parts
        assert [span_of(each)[:2] for each in parts.values()] == [(0, 2), (3, 3), (4, 5)]

    def test_what_a_damaged_part_stands_for_is_kept(self, run_folder: Path) -> None:
        many_parts(run_folder, ranks=1)
        compacted(run_folder, age=60.0, waits=lambda _: None)
        whole = list_table(table_folder(run_folder, 0, Table.STEPS))
        assert len(whole.superseded) == 3
        whole.parts[0].write_bytes(b"PAR1 and then nothing")
        done = compacted(run_folder)
        assert list_table(table_folder(run_folder, 0, Table.STEPS)).superseded == whole.superseded
        assert str(whole.parts[0]) in [left.path for left in done.left_alone]

    def test_a_journal_that_is_none(self, run_folder: Path) -> None:
        many_parts(run_folder, ranks=1)
        of = table_folder(run_folder, 0, Table.STEPS)
        journal = of / "journal-000009.arrow"
        rows = pa.record_batch({"step": [1]})
        journal.write_bytes(rows.schema.serialize().to_pybytes() + rows.serialize().to_pybytes())
        done = compacted(run_folder)
        assert journal.exists()
        assert [left.path for left in done.left_alone] == [str(journal)]

    def test_a_folder_that_is_no_run(self, tmp_path: Path) -> None:
        done = compacted(tmp_path)
        assert [left.failed for left in done.left_alone] == [True]
        assert done.before.files == 0

    def test_a_run_in_an_object_store(self) -> None:
        (left,) = compacted(location("memory://bucket/run")).left_alone
        assert (left.failed, "on a disk" in left.why) == (True, True)


def _never(seconds: float) -> None:
    raise AssertionError(f"waited for {seconds} s")
