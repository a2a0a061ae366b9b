from __future__ import annotations

import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import narwhals as nw
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampscope.errors import RunDamaged, RunTooNew
from ampscope.trace.files.journal import JournalReader
from ampscope.trace.files.layout import Listing, list_table, table_folder
from ampscope.trace.manifest import Manifest, read_manifest, write_manifest
from ampscope.trace.read import table_folders
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import Row, Source, Table, arrow_schema, rows_of
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt
from tests.support.trace_builder import START, TraceBuilder


@pytest.fixture
def large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table counts as a large one, whose rows stay on the disk until a query needs them."""
    monkeypatch.setattr("ampscope.trace.read.small_tables.MOST_ROWS", 0)


def samples() -> dict[Table, list[Row]]:
    """Two rows of every table: all that may be null is null in the second; extremes in the first."""
    extremes: dict[pa.DataType, Any] = {
        pa.int16(): 2**15 - 1,
        pa.int32(): -(2**31),
        pa.int64(): 2**62,
        pa.float32(): 1.5,
        pa.float64(): -math.inf,
        pa.bool_(): True,
        pa.string(): "it's \u00fc \x00 <b>\n",
        pa.list_(pa.string()): ("8x8", ""),  # as dtypes or as shapes
        pa.list_(pa.int64()): (1, 2**40),
        pa.list_(pa.float32()): (1.5, 0.25),
        pa.list_(pa.int32()): (1, 2**31 - 1),
    }
    rows: dict[Table, list[Row]] = {}
    for table in Table:
        most = [extremes[field.type] for field in arrow_schema(table)]
        least: list[Any] = [None if field.nullable else extremes[field.type] for field in arrow_schema(table)]
        rows[table] = rows_of(table, list(zip(most, least, strict=True)))
    return rows


@pytest.fixture(params=["journals", "parts", "both"])
def written(request: pytest.FixtureRequest, run_folder: Path) -> Any:
    """A folder with `samples` of every table, still in journals, in sealed parts, or in both."""
    seal_at = SealAt(batches=2) if request.param == "both" else SealAt()
    writer = TraceWriter(run_folder, manifest=Manifest(), seal_at=seal_at)
    for table, rows in samples().items():
        writer.put(table, rows[:1])
        writer.flush()
        writer.put(table, rows[1:])
        writer.flush()
    if request.param == "parts":
        writer.close()
    yield run_folder
    writer.close()


@pytest.mark.parametrize("table", Table)
def test_every_table_comes_back_as_it_was_put(written: Path, table: Table) -> None:
    with open_run(written) as run:
        assert sorted(map(repr, run.rows(table))) == sorted(map(repr, samples()[table]))
        frame = run.table(table)
        schema = arrow_schema(table)
        assert frame.collect_schema().names() == [*schema.names, "rank"]
        assert frame.collect().to_arrow().schema.types == [*schema.types, pa.int32()]


@pytest.mark.parametrize("table", Table)
def test_a_table_without_rows_has_its_columns(run_folder: Path, table: Table) -> None:
    TraceBuilder(run_folder).close()
    with open_run(run_folder) as run:
        frame = run.table(table).collect()
        assert frame.shape == (0, len(arrow_schema(table)) + 1)
        assert run.rows(table) == []


def test_a_property_for_every_table(run_folder: Path) -> None:
    TraceBuilder(run_folder).close()
    with open_run(run_folder) as run:
        for table in Table:
            frame = getattr(run, table.value)
            assert isinstance(frame, nw.LazyFrame)
            assert frame.collect_schema() == run.table(table).collect_schema()


class TestRows:
    @pytest.fixture
    def run(self, run_folder: Path) -> Any:
        builder = TraceBuilder(run_folder)
        for step in (2, 0, 1):
            builder.step(step=step, skipped=step == 1, loss=None if step == 2 else math.nan)
        builder.op(source=Source.LIVE)
        builder.op(source=Source.REPLAY)
        run = open_run(builder.close())
        yield run
        run.close()

    def test_come_in_order(self, run: Run) -> None:
        assert [row.step for row in run.rows(Table.STEPS)] == [0, 1, 2]

    def test_equal_what_is_asked_for(self, run: Run) -> None:
        assert [row.step for row in run.rows(Table.STEPS, skipped=True)] == [1]
        assert [row.step for row in run.rows(Table.STEPS, loss=None)] == [2]
        assert [row.step for row in run.rows(Table.STEPS, step=0, optimizer=0, rank=0)] == [0]
        assert run.rows(Table.STEPS, step=0, rank=1) == []
        assert [row.source for row in run.rows(Table.OPS, source=Source.LIVE)] == ["live"]
        assert run.rows(Table.OPS, source="'; DROP TABLE ops; --") == []

    def test_not_a_number_is_not_nothing(self, run: Run) -> None:
        assert math.isnan(run.rows(Table.STEPS, step=0)[0].loss)  # type: ignore[arg-type]  # it is a float here
        assert run.steps.filter(nw.col("loss").is_null()).collect().shape[0] == 1
        assert run.steps.filter(nw.col("loss").is_nan()).collect().shape[0] == 2

    def test_lists_come_as_tuples(self, run: Run) -> None:
        assert run.rows(Table.OPS)[0].statistics.exp_counts == (1, 2, 4, 8, 16, 16, 16, 1)

    def test_an_unknown_column(self, run: Run) -> None:
        with pytest.raises(duckdb.BinderException, match="colour"):
            run.rows(Table.STEPS, colour="red")


@pytest.mark.usefixtures("large_tables")
def test_the_rows_of_a_step_come_from_the_parts_that_can_hold_it(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampscope.trace.write.writer._seal_at", lambda _: SealAt(rows=4))
    builder = TraceBuilder(run_folder)
    for step in range(6):
        for _ in range(3):
            builder.op(step=step)
        assert builder.writer.flush()
    with open_run(builder.close()) as run:
        parts = sorted(table_folder(run_folder, 0, Table.OPS).glob("*.parquet"))
        assert len(parts) == 3
        assert [row.seq for row in run.rows(Table.OPS, step=3)] == [0, 1, 2]
        parts[0].write_bytes(b"")  # which holds steps 0 and 1, and is not read for another
        assert [row.seq for row in run.rows(Table.OPS, step=3)] == [0, 1, 2]
        assert run.table(Table.OPS, step=5).collect()["step"].to_list() == [5, 5, 5]
        assert run.rows(Table.OPS, step=7) == []
        assert sorted(run.table(Table.OPS, step=(5, 3, 3)).collect()["step"].to_list()) == [3, 3, 3, 5, 5, 5]
        assert len(run.table(Table.OPS, step=()).collect()) == 0
        with pytest.raises(RunDamaged, match="part-000000"):
            run.table(Table.OPS, step=(1, 5))


class TestOpenRun:
    """A run that is being written."""

    def test_each_look_sees_what_is_new(self, run_folder: Path) -> None:
        builder = TraceBuilder(run_folder)
        builder.leave_open()
        with open_run(run_folder) as run:
            for count in range(1, 4):
                builder.step()
                builder.leave_open()
                assert len(run.rows(Table.STEPS)) == count
            builder.close()
            assert len(run.rows(Table.STEPS)) == 3

    def test_a_new_look_reads_only_what_was_appended(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        builder = TraceBuilder(run_folder)
        builder.step()
        parsed: list[int] = []
        real = pa.ipc.read_record_batch

        def counted(*arguments: Any) -> pa.RecordBatch:
            parsed.append(1)
            return real(*arguments)

        with open_run(builder.leave_open()) as run:
            assert len(run.rows(Table.STEPS)) == 1
            builder.step()
            builder.leave_open()
            monkeypatch.setattr(pa.ipc, "read_record_batch", counted)
            assert len(run.rows(Table.STEPS)) == 2
            assert len(parsed) == 1
            assert len(run.rows(Table.STEPS)) == 2
            assert len(parsed) == 1
            builder.close()

    def test_a_stamp_tells_whether_there_are_new_rows(self, run_folder: Path) -> None:
        builder = TraceBuilder(run_folder)
        builder.step()
        with open_run(builder.leave_open()) as run:
            before = run.stamp(Table.STEPS)
            assert run.stamp(Table.STEPS) == before
            builder.grad()
            builder.leave_open()
            assert run.stamp(Table.STEPS) == before
            builder.step()
            builder.leave_open()
            assert run.stamp(Table.STEPS) != before
            builder.close()

    def test_a_frame_keeps_its_moment(self, run_folder: Path) -> None:
        builder = TraceBuilder(run_folder)
        builder.step()
        with open_run(builder.leave_open()) as run:
            before = run.steps
            builder.step()
            builder.close()
            assert before.collect().shape[0] == 1
            assert run.steps.collect().shape[0] == 2

    def test_status(self, run_folder: Path) -> None:
        builder = TraceBuilder(run_folder)
        with open_run(run_folder) as run:
            seen: list[str] = [run.status]
            builder.close()
            seen.append(run.status)
            write_manifest(run_folder, Manifest(segments=read_manifest(run_folder).segments))
            seen.append(run.status)
            assert seen == ["open", "closed", "interrupted"]

    def test_a_journal_sealed_while_it_is_read(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        builder = TraceBuilder(run_folder)
        builder.step()
        builder.leave_open()
        real = JournalReader.read

        def slow(reader: JournalReader) -> pa.Table:
            builder.close()
            return real(reader)

        monkeypatch.setattr(JournalReader, "read", slow)
        with open_run(run_folder) as run:
            assert len(run.rows(Table.STEPS)) == 1

    @pytest.mark.usefixtures("large_tables")
    def test_a_part_deleted_by_the_budget_while_it_is_looked_for(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        builder = TraceBuilder(run_folder)
        builder.grad()
        with open_run(builder.close()) as run:
            part = table_folder(run_folder, 0, Table.GRADS) / "part-000000.parquet"
            real = Scan.relation

            def late(*arguments: Any, **named: Any) -> Any:
                relation = real(*arguments, **named)
                part.unlink(missing_ok=True)
                return relation

            monkeypatch.setattr(Scan, "relation", late)
            assert run.rows(Table.GRADS) == []

    def test_a_part_deleted_by_the_budget_before_it_was_ever_read(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        builder = TraceBuilder(run_folder)
        builder.grad()
        part = table_folder(builder.close(), 0, Table.GRADS) / "part-000000.parquet"
        real = list_table

        def late(folder: Path) -> Any:
            listing = real(folder)
            part.unlink(missing_ok=True)
            return listing

        monkeypatch.setattr(table_folders, "list_table", late)
        with open_run(run_folder) as run:
            assert run.rows(Table.GRADS) == []


def test_ranks_are_one_table(run_folder: Path) -> None:
    for rank in (0, 1, 11):
        builder = TraceBuilder(run_folder, rank=rank)
        builder.step(loss=float(rank))
        builder.close()
    with open_run(run_folder) as run:
        assert run.ranks == [0, 1, 11]
        assert [row.loss for row in run.rows(Table.STEPS)] == [0.0, 1.0, 11.0]
        assert run.sql("SELECT rank, loss FROM steps ORDER BY rank").fetchall() == [(0, 0.0), (1, 1.0), (11, 11.0)]
        assert [row.loss for row in run.rows(Table.STEPS, rank=11)] == [11.0]


def test_folders_named_like_columns_do_not_mix_in(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "step=7" / "rank=3" / "it's [a] run*")
    builder.step(step=1)
    with open_run(builder.close()) as run:
        assert run.sql("SELECT step, rank FROM steps").fetchall() == [(1, 0)]


class TestOtherVersions:
    def rewrite(self, run: Path, change: Any) -> None:
        part = table_folder(run, 0, Table.STEPS) / "part-000000.parquet"
        with pq.ParquetFile(part) as file:
            rows = file.read()
        pq.write_table(change(rows), part)

    def two_parts(self, run_folder: Path) -> None:
        for _ in range(2):
            builder = TraceBuilder(run_folder)
            builder.step(loss=0.5)
            builder.close()

    def test_a_column_that_an_older_writer_did_not_know_is_null(self, run_folder: Path) -> None:
        self.two_parts(run_folder)
        self.rewrite(run_folder, lambda rows: rows.drop_columns(["loss", "lr"]))
        with open_run(run_folder) as run:
            assert [row.loss for row in run.rows(Table.STEPS)] == [None, 0.5]
            assert run.steps.collect_schema()["loss"] == nw.Float64

    def test_a_column_of_a_newer_writer_is_passed_over(self, run_folder: Path) -> None:
        self.two_parts(run_folder)
        self.rewrite(run_folder, lambda rows: rows.append_column("mood", pa.array(["good"])))
        with open_run(run_folder) as run:
            assert [row.loss for row in run.rows(Table.STEPS)] == [0.5, 0.5]

    def test_columns_in_another_order(self, run_folder: Path) -> None:
        self.two_parts(run_folder)
        self.rewrite(run_folder, lambda rows: rows.select(rows.column_names[::-1]))
        with open_run(run_folder) as run:
            assert [(row.step, row.loss) for row in run.rows(Table.STEPS)] == [(0, 0.5), (1, 0.5)]

    def test_a_newer_schema(self, run_folder: Path) -> None:
        self.two_parts(run_folder)
        write_manifest(run_folder, Manifest(schema=99))
        with pytest.raises(RunTooNew, match="upgrade"):
            open_run(run_folder)


def deleted(part: Path) -> None:
    part.unlink()
    raise duckdb.IOException("deleted since")


def damage_inside_a_part(folder: Path) -> None:
    """Writes a run of one step, and zeros over some of its row."""
    builder = TraceBuilder(folder)
    builder.step()
    builder.close()
    part = table_folder(folder, 0, Table.STEPS) / "part-000000.parquet"
    content = part.read_bytes()
    part.write_bytes(content[:4] + bytes(200) + content[204:])


class TestDamage:
    @pytest.mark.parametrize("size", [0, 3, 100, -1])
    def test_a_truncated_part_is_named_and_the_rest_is_intact(self, run_folder: Path, size: int) -> None:
        builder = TraceBuilder(run_folder)
        builder.step()
        builder.event(text="here")
        builder.close()
        part = table_folder(run_folder, 0, Table.STEPS) / "part-000000.parquet"
        part.write_bytes(part.read_bytes()[:size])
        with open_run(run_folder) as run:
            with pytest.raises(RunDamaged, match=r"steps/part-000000\.parquet cannot be read.*Move that file away"):
                run.steps.collect()
            assert [row.text for row in run.rows(Table.EVENTS)] == ["here"]
            part.unlink()
            assert run.rows(Table.STEPS) == []

    def test_a_part_that_the_database_cannot_bind_is_named(self, run_folder: Path) -> None:
        builder = TraceBuilder(run_folder)
        builder.step()
        builder.close()
        part = table_folder(run_folder, 0, Table.STEPS) / "part-000000.parquet"
        connection = Mock(wraps=duckdb.connect(), spec=duckdb.DuckDBPyConnection)
        connection.read_parquet = Mock(side_effect=duckdb.IOException("no such encoding"))
        with pytest.raises(RunDamaged, match=r"steps/part-000000\.parquet cannot be read .no such encoding"):
            Scan(run_folder).relation(connection, Table.STEPS)
        connection.read_parquet.side_effect = lambda *_, **__: deleted(part)
        with pytest.raises(duckdb.IOException, match="deleted"):
            Scan(run_folder).relation(connection, Table.STEPS)

    @pytest.mark.usefixtures("large_tables")
    def test_damage_inside_a_part_is_named(self, run_folder: Path) -> None:
        damage_inside_a_part(run_folder)
        with open_run(run_folder) as run:
            with pytest.raises(RunDamaged, match=r"steps/part-000000\.parquet cannot be read"):
                run.rows(Table.STEPS)
            with pytest.raises(duckdb.Error):
                run.steps.collect()
            with pytest.raises(RunDamaged, match=r"steps/part-000000\.parquet"):
                run.verify()

    def test_damage_inside_a_part_of_a_small_table_is_named_at_once(self, run_folder: Path) -> None:
        damage_inside_a_part(run_folder)
        with open_run(run_folder) as run:
            for look in (lambda: run.rows(Table.STEPS), lambda: run.steps, lambda: run.sql("FROM steps")):
                with pytest.raises(RunDamaged, match=r"steps/part-000000\.parquet cannot be read"):
                    look()


class TestSql:
    def test_joins_tables(self, run_folder: Path) -> None:
        builder = TraceBuilder(run_folder)
        builder.op(builder.site("aten.log.default"))
        with open_run(builder.close()) as run:
            query = "SELECT s.op, o.max FROM ops o JOIN sites s USING (site)"
            assert run.sql(query).fetchall() == [("aten.log.default", 1.0)]

    def test_frames_of_one_run_join(self, run_folder: Path) -> None:
        builder = TraceBuilder(run_folder)
        builder.op(builder.site("aten.log.default"))
        with open_run(builder.close()) as run:
            joined = run.ops.join(run.sites, on=["site", "rank"]).select("op", "max").collect()
            assert joined.rows() == [("aten.log.default", 1.0)]

    @pytest.mark.parametrize(
        "query",
        [
            "SELECT * FROM read_csv('{outside}')",
            "SELECT * FROM read_text('{outside}')",
            "SELECT * FROM '{outside}'",
            "COPY steps TO '{outside}'",
            "ATTACH '{outside}' AS other",
            "SET enable_external_access = true",
            "SET autoinstall_known_extensions = true",
            "INSTALL httpfs",
            "LOAD httpfs",
            "SELECT * FROM read_parquet('https://example.org/x.parquet')",
            "SELECT * FROM secret",
        ],
    )
    def test_reaches_nothing_but_the_run(self, tmp_path: Path, run_folder: Path, query: str) -> None:
        outside = tmp_path / "outside.csv"
        outside.write_text("a,b\n1,2\n")
        secret = pa.table({"a": [1]})  # noqa: F841  # a local variable must not be found by its name
        with open_run(TraceBuilder(run_folder).close()) as run, pytest.raises(duckdb.Error):
            run.sql(query.format(outside=outside)).fetchall()


def test_several_threads_read_at_once(run_folder: Path) -> None:
    builder = TraceBuilder(run_folder)
    for _ in range(50):
        builder.step()
    builder.leave_open()
    counts: list[int] = []
    with open_run(run_folder) as run:

        def look() -> None:
            for _ in range(5):
                counts.append(len(run.rows(Table.STEPS)))
                counts.extend(run.sql("SELECT count(*) FROM steps").fetchall()[0])
                counts.append(run.steps.collect().shape[0])

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    builder.close()
    assert counts == [50] * 60


def test_what_comes_into_or_goes_from_a_folder_long_at_rest_is_seen(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step()
    with open_run(trace.close()) as run:
        folder = table_folder(run.path, 0, Table.STEPS)
        os.utime(folder, (START, START))
        assert len(run.rows(Table.STEPS)) == 1
        shutil.copy(folder / "part-000000.parquet", folder / "part-000001.parquet")
        assert len(run.rows(Table.STEPS)) == 2
        os.utime(folder, (START + 9, START + 9))
        assert len(run.rows(Table.STEPS)) == 2
        (folder / "part-000000.parquet").unlink()
        assert len(run.rows(Table.STEPS)) == 1


def test_repr_and_path(run_folder: Path) -> None:
    TraceBuilder(run_folder, created=START).close()
    with open_run(str(run_folder)) as run:
        assert repr(run) == f"Run({str(run_folder)!r})"
        assert run.path == run_folder
        assert run.manifest == read_manifest(run_folder)


def test_a_journal_sealed_while_the_folder_is_listed(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing is not one instant: number 0 can be gone as a journal and not yet seen as a part."""
    for _ in range(2):
        builder = TraceBuilder(run_folder)
        builder.step()
        builder.close()
    real = list_table
    looks: list[Listing] = []

    def blind_at_first(folder: Path) -> Listing:
        listing = real(folder)
        looks.append(listing)
        return Listing({1: listing.parts[1]}, {}) if len(looks) == 1 else listing

    monkeypatch.setattr(table_folders, "list_table", blind_at_first)
    with open_run(run_folder) as run:
        assert [row.step for row in run.rows(Table.STEPS)] == [0, 1]


@pytest.mark.usefixtures("large_tables")
def test_a_table_has_an_end_however_many_parts_it_has(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        builder = TraceBuilder(run_folder)
        builder.step()
        builder.close()
    monkeypatch.setattr("ampscope.trace.read.table_scan._MOST_ROWS", 2)
    with open_run(run_folder) as run, pytest.raises(RunDamaged, match="more than the 2 rows that are read"):
        run.rows(Table.STEPS)


def test_a_query_has_a_limit_of_memory_and_no_file(run_folder: Path) -> None:
    TraceBuilder(run_folder).close()
    with open_run(run_folder) as run:
        told = run.sql("SELECT current_setting('memory_limit'), current_setting('temp_directory')").fetchall()
    assert told == [("4.0 GiB", "")]
