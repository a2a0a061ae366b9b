"""The writer from the training thread's side: what was put is there, and nothing that goes wrong reaches training."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ampscope.errors import RunTooNew
from ampscope.trace.files.journal import Journal
from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.manifest import Manifest, read_manifest, write_manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import EventRow, GradRow, OpRow, SiteRow, Statistics, Table
from ampscope.trace.write import writing_threads
from ampscope.trace.write.disk_budget import enforce
from ampscope.trace.write.writer import TraceWriter, _seal_at
from ampscope.trace.write.writing_threads import SealAt


def event(step: int, text: str = "") -> EventRow:
    return EventRow(step=step, segment=0, time=1.7e9 + step, kind="note", text=text)


def grad(step: int) -> GradRow:
    return GradRow(step=step, optimizer=0, param=0, max_abs=1.0, nonfinite=False, underflow=0.0)


def op(step: int, source: str = "live") -> OpRow:
    return OpRow(step, source, 0, 0, 0, 0, 8, statistics=Statistics(0.0, 1.0))


def site(number: int) -> SiteRow:
    return SiteRow(
        site=number,
        op="",
        name="",
        module="",
        module_type="",
        phase="",
        file="",
        line=1,
        function="",
        code="",
        in_dtypes=(),
        in_shapes=(),
        out_dtypes=(),
        out_shapes=(),
        scalars="{}",
        autocast="",
        cast="",
        grad_fn="",
        forward_site=None,
    )


def writer(folder: Path, **arguments: Any) -> TraceWriter:
    return TraceWriter(folder, manifest=Manifest(), **arguments)


def steps_of(folder: Path, table: Table = Table.EVENTS) -> list[int]:
    with open_run(folder) as run:
        return [row._asdict()["step"] for row in run.rows(table)]


def numbers(folder: Path, table: Table, rank: int = 0) -> tuple[list[int], list[int]]:
    listing = list_table(table_folder(folder, rank, table))
    return list(listing.parts), list(listing.journals)


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the disk hang until the event is set."""
    gate = threading.Event()
    real = Journal.append

    def append(self: Journal, batch: Any) -> None:
        assert gate.wait(30)
        real(self, batch)

    monkeypatch.setattr(Journal, "append", append)
    return gate


class TestLife:
    def test_close_seals_everything_and_says_so(self, run_folder: Path) -> None:
        trace = writer(run_folder)
        trace.put(Table.EVENTS, [event(0), event(1)])
        trace.close()
        assert numbers(run_folder, Table.EVENTS) == ([0], [])
        manifest = read_manifest(run_folder)
        assert manifest.closed is not None
        assert manifest.closed >= manifest.segments[0].started >= manifest.created > 0
        assert steps_of(run_folder) == [0, 1]

    def test_close_again_and_put_after_it_do_nothing(self, run_folder: Path) -> None:
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, [event(0)])
        trace.close()
        trace.put(Table.EVENTS, [event(1)])
        assert trace.flush()
        assert steps_of(run_folder) == [0]

    def test_no_thread_is_left(self, run_folder: Path) -> None:
        before = threading.active_count()
        trace = writer(run_folder)
        assert threading.active_count() == before + 2
        trace.close()
        assert threading.active_count() == before

    def test_a_forgotten_writer_closes_itself(self, run_folder: Path) -> None:
        trace = writer(run_folder)
        trace.put(Table.EVENTS, [event(0)])
        del trace
        gc.collect()
        assert read_manifest(run_folder).closed is not None
        assert steps_of(run_folder) == [0]

    def test_flush_shows_every_row_put_before_it(self, run_folder: Path) -> None:
        with writer(run_folder) as trace:
            for step in range(5):
                trace.put(Table.EVENTS, [event(step)])
                assert trace.flush()
                assert steps_of(run_folder) == list(range(step + 1))

    def test_flush_gives_up_in_time(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = hold(monkeypatch)
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, [event(0)])
            assert not trace.flush(timeout=0.01)
            gate.set()
            assert trace.flush()

    def test_rows_put_by_several_threads_all_arrive(self, run_folder: Path) -> None:
        with writer(run_folder) as trace:

            def put_one_by_one(first: int) -> None:
                for number in range(first, first + 50):
                    trace.put(Table.EVENTS, [event(number)])

            threads = [threading.Thread(target=put_one_by_one, args=(first,)) for first in range(0, 200, 50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sorted(steps_of(run_folder)) == list(range(200))

    def test_no_rows_are_no_journal(self, run_folder: Path) -> None:
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, [])
            assert trace.flush()
        assert numbers(run_folder, Table.EVENTS) == ([], [])
        assert steps_of(run_folder) == []

    def test_an_own_copy_of_the_rows_is_written(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = hold(monkeypatch)
        rows = [event(0)]
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, rows)
            rows.clear()
            gate.set()
        assert steps_of(run_folder) == [0]


class TestSealing:
    def test_at_a_number_of_rows(self, run_folder: Path) -> None:
        with writer(run_folder, seal_at=SealAt(rows=2)) as trace:
            for step in range(5):
                trace.put(Table.EVENTS, [event(step)])
                trace.flush()
            assert numbers(run_folder, Table.EVENTS)[1][-1:] == [2]
        assert numbers(run_folder, Table.EVENTS) == ([0, 1, 2], [])
        assert steps_of(run_folder) == list(range(5))

    @pytest.mark.parametrize("seal_at", [SealAt(size=1), SealAt(batches=1)])
    def test_at_a_size_or_a_number_of_batches(self, run_folder: Path, seal_at: SealAt) -> None:
        with writer(run_folder, seal_at=seal_at) as trace:
            for step in range(3):
                trace.put(Table.EVENTS, [event(step)])
                trace.flush()
        assert numbers(run_folder, Table.EVENTS) == ([0, 1, 2], [])

    def test_sealing_does_not_hold_up_the_journals(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda descriptor: (gate.wait(30), real(descriptor)))
        gate.set()
        with writer(run_folder, seal_at=SealAt(rows=1)) as trace:
            gate.clear()
            for step in range(3):
                trace.put(Table.EVENTS, [event(step)])
                assert trace.flush()
            assert steps_of(run_folder) == [0, 1, 2]
            assert numbers(run_folder, Table.EVENTS) == ([], [0, 1, 2])
            gate.set()
        assert steps_of(run_folder) == [0, 1, 2]

    def test_parts_are_zstd_parquet_that_others_can_read(self, run_folder: Path) -> None:
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, [event(0)])
        part = table_folder(run_folder, 0, Table.EVENTS) / "part-000000.parquet"
        assert pq.read_metadata(part).row_group(0).column(0).compression == "ZSTD"
        others = pq.read_table(run_folder / "rank=0" / "events")
        assert others["step"].to_pylist() == [0]
        assert pq.read_table(run_folder / "rank=0").num_rows == 1  # the lock file is not in the way


class TestBudget:
    def test_bulk_goes_first_and_only_bulk(self, run_folder: Path) -> None:
        notices: list[str] = []
        trace = writer(run_folder, disk_budget=1, seal_at=SealAt(rows=1), on_notice=notices.append)
        for step in range(3):
            trace.put(Table.GRADS, [grad(step)])
            trace.put(Table.EVENTS, [event(step)])
            trace.flush()
        trace.close()
        assert steps_of(run_folder) == [0, 1, 2]
        assert numbers(run_folder, Table.GRADS) == ([], [])
        assert len(notices) == 1
        assert "disk budget" in notices[0]
        assert trace.failure is None

    def test_the_oldest_goes_first_and_replays_last(self, run_folder: Path) -> None:
        trace = writer(run_folder, seal_at=SealAt(rows=1))
        for step, source in enumerate(["replay", "live", "live", "replay:fp32", "live"]):
            trace.put(Table.OPS, [op(step, source)])
            trace.flush()
        trace.close()
        folder = table_folder(run_folder, 0, Table.OPS)
        for number, path in list_table(folder).parts.items():
            os.utime(path, (number, number))
        left = []
        for _ in range(5):
            size = sum(path.stat().st_size for path in (run_folder / "rank=0").glob("*/*"))
            assert enforce(run_folder, 0, size - 1) > 0
            left.append(list(list_table(folder).parts))
        assert left == [[0, 2, 3, 4], [0, 3, 4], [0, 3], [3], []]

    def test_each_rank_keeps_to_its_share(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(writing_threads, "enforce", lambda run, rank, budget: asked.append((rank, budget)))
        with TraceWriter(run_folder, manifest=Manifest(world_size=4), disk_budget=4 << 20, rank=3) as trace:
            trace.put(Table.EVENTS, [event(0)])
        assert asked == [(3, 1 << 20)]

    def test_a_small_budget_makes_small_journals(self) -> None:
        assert _seal_at(2 << 30).size == 16 << 20
        assert _seal_at(64 << 20).size == 2 << 20
        assert _seal_at(0).size == 64 << 10


class TestTrouble:
    def test_a_slow_disk_drops_bulk_rows_first(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = hold(monkeypatch)
        notices: list[str] = []
        trace = writer(run_folder, queue_rows=10, on_notice=notices.append)
        trace.put(Table.EVENTS, [event(0)])
        for step in range(30):
            trace.put(Table.GRADS, [grad(step)])
        trace.put(Table.EVENTS, [event(1)])
        gate.set()
        trace.close()
        assert steps_of(run_folder) == [0, 1]
        assert len(steps_of(run_folder, Table.GRADS)) < 30
        assert trace.dropped == 30 - len(steps_of(run_folder, Table.GRADS))
        assert len(notices) == 1
        assert "too slow" in notices[0]

    def test_memory_is_bounded_for_other_tables_too(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = hold(monkeypatch)
        trace = writer(run_folder, queue_rows=10)
        for step in range(100):
            trace.put(Table.EVENTS, [event(step)])
        gate.set()
        trace.close()
        assert trace.dropped >= 100 - 20 - 20
        assert len(steps_of(run_folder)) == 100 - trace.dropped

    def test_a_full_disk_ends_writing_and_nothing_else(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failures: list[BaseException] = []
        trace = writer(run_folder, on_failure=failures.append)
        trace.put(Table.EVENTS, [event(0)])
        assert trace.flush()

        def full(self: Journal, batch: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Journal, "append", full)
        trace.put(Table.EVENTS, [event(1)])
        assert not trace.flush(timeout=None)
        trace.put(Table.EVENTS, [event(2)])
        assert not trace.flush(timeout=None)
        trace.close()
        assert trace.failure is failures[0]
        assert len(failures) == 1
        assert steps_of(run_folder) == [0]
        assert open_run(run_folder).status == "interrupted"

    def test_a_disk_full_while_sealing_loses_nothing(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failures: list[BaseException] = []
        trace = writer(run_folder, on_failure=failures.append, seal_at=SealAt(rows=1))

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        trace.put(Table.EVENTS, [event(0)])
        trace.close()
        assert [type(failure) for failure in failures] == [OSError]
        assert numbers(run_folder, Table.EVENTS) == ([], [0])
        assert not list(run_folder.rglob("*.tmp"))
        assert steps_of(run_folder) == [0]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_mistake_of_ours_ends_writing_too(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failures: list[BaseException] = []
        trace = writer(run_folder, on_failure=failures.append)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(writing_threads, "journal_path", broken)
        trace.put(Table.EVENTS, [event(0)])
        assert not trace.flush(timeout=None)
        trace.close()
        assert isinstance(failures[0], ZeroDivisionError)

    def test_a_row_that_does_not_fit_is_left_out_alone(self, run_folder: Path) -> None:
        notices: list[str] = []
        with writer(run_folder, on_notice=notices.append) as trace:
            bad = event(1)._replace(text=None)  # type: ignore[arg-type]  # the point
            trace.put(Table.EVENTS, [event(0), bad, event(2), bad])
            trace.put(Table.EVENTS, [bad])
            trace.flush()
            trace.put(Table.EVENTS, [event(3)])
        assert steps_of(run_folder) == [0, 2, 3]
        assert len(notices) == 1
        assert "events" in notices[0]
        assert "text" in notices[0]
        assert trace.failure is None

    def test_a_notice_may_put_rows(self, run_folder: Path) -> None:
        trace: TraceWriter = writer(run_folder, on_notice=lambda text: trace.put(Table.EVENTS, [event(9, text)]))
        trace.put(Table.GRADS, [grad(0)._replace(step=None)])  # type: ignore[arg-type]  # the point
        trace.flush()
        trace.flush()
        trace.close()
        assert steps_of(run_folder) == [9]

    def test_what_is_referred_to_is_written_first(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[str] = []
        gate = threading.Event()
        real = Journal.append

        def append(self: Journal, batch: Any) -> None:
            gate.wait(30)
            order.append(self.path.parent.name)
            real(self, batch)

        monkeypatch.setattr(Journal, "append", append)
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, [event(0)])  # the journal thread waits here
            trace.put(Table.OPS, [op(0)])
            trace.put(Table.SITES, [site(0)])
            gate.set()
        assert order.index("sites") < order.index("ops")


class TestDoor:
    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            writer(tmp_path / "file" / "run")

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_permission(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError):
            writer(tmp_path / "run")

    def test_a_manifest_that_cannot_be_written(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                writer(run_folder)
        writer(run_folder).close()  # and the lock was given back

    def test_one_writer_at_a_time(self, run_folder: Path) -> None:
        with writer(run_folder):
            with pytest.raises(BlockingIOError, match="another process is writing this run"):
                writer(run_folder)
            writer(run_folder, rank=1).close()
        writer(run_folder).close()

    def test_a_run_of_a_newer_schema_is_left_alone(self, run_folder: Path) -> None:
        run_folder.mkdir()
        write_manifest(run_folder, Manifest(schema=99))
        with pytest.raises(RunTooNew):
            writer(run_folder)


class TestCatchingUp:
    """What the step before left is waited for, for a moment."""

    def test_what_was_put_is_there_for_a_reader(self, run_folder: Path) -> None:
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, [event(1)])
            trace.catch_up(30.0)
            assert steps_of(run_folder) == [1]

    def test_a_slow_disk_is_waited_for_once(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with writer(run_folder) as trace:
            written, asked = threading.Event(), list[None]()

            def mark() -> threading.Event:
                asked.append(None)
                return written

            monkeypatch.setattr(trace._queue, "mark", mark)
            monkeypatch.setattr(type(trace._queue), "is_written", False)
            for _ in range(3):
                trace.catch_up(0.001)
            assert len(asked) == 1
            written.set()
            trace.catch_up(0.001)
            assert len(asked) == 2

    def test_nobody_is_waited_for_when_all_is_written(self, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with writer(run_folder) as trace:
            trace.put(Table.EVENTS, [event(1)])
            assert trace.flush()
            monkeypatch.setattr(trace._queue, "mark", lambda: pytest.fail("asked the journal thread"))
            trace.catch_up(30.0)
