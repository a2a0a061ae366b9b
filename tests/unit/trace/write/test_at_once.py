"""A step's row is in its journal when `put` returns, unless something stands in the way; then it comes by the queue."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.files.journal import Journal
from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.manifest import Manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import EventRow, StepRow, Table
from ampscope.trace.write import writing_threads
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import JournalThread, SealAt


def step(number: int) -> StepRow:
    return StepRow(number, 0, 0, 1.7e9, 0.5, 1024.0, 3, False, False, 2.5, 1e-3, 2, 0.25, 0.0625, "")


def steps_of(folder: Path) -> list[int]:
    with open_run(folder) as run:
        return [row.step for row in run.rows(Table.STEPS)]


@pytest.fixture
def trace(run_folder: Path) -> Iterator[TraceWriter]:
    """A writer whose thread has begun, and waits."""
    with _ready(TraceWriter(run_folder, manifest=Manifest())) as writer:
        yield writer


def _ready(writer: TraceWriter) -> TraceWriter:
    assert writer.flush()
    return writer


@pytest.fixture
def asleep(trace: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The journal thread does nothing from its next row on, until the event is set."""
    awake = threading.Event()
    real = JournalThread._record

    def record(self: JournalThread, waiting: Any) -> None:
        assert awake.wait(30)
        real(self, waiting)

    monkeypatch.setattr(JournalThread, "_record", record)
    trace.put(Table.EVENTS, [EventRow(0, 0, 1.0, "note", "")])
    yield awake
    awake.set()


@pytest.mark.usefixtures("asleep")
def test_it_is_there_when_put_returns(trace: TraceWriter) -> None:
    for number in range(3):
        trace.put(Table.STEPS, [step(number)])
        assert steps_of(trace.folder) == list(range(number + 1))
        assert not trace.waits(Table.STEPS)


def test_what_waits_is_not_overtaken(trace: TraceWriter, asleep: threading.Event) -> None:
    trace.put(Table.STEPS, [step(0), step(1)])
    assert trace.waits(Table.STEPS)
    trace.put(Table.STEPS, [step(2)])
    assert steps_of(trace.folder) == []
    asleep.set()
    assert trace.flush()
    assert steps_of(trace.folder) == [0, 1, 2]
    trace.put(Table.STEPS, [step(3)])
    assert not trace.waits(Table.STEPS)


def test_a_full_journal_is_sealed(run_folder: Path) -> None:
    with _ready(TraceWriter(run_folder, manifest=Manifest(), seal_at=SealAt(rows=2))) as trace:
        for number in range(7):
            trace.put(Table.STEPS, [step(number)])
            assert trace.flush()
    listing = list_table(table_folder(run_folder, 0, Table.STEPS))
    assert (len(listing.parts), list(listing.journals)) == (3, [])
    assert steps_of(run_folder) == list(range(7))


def test_no_steps_leave_no_file(trace: TraceWriter) -> None:
    trace.close()
    assert list((trace.folder / "rank=0" / "steps").iterdir()) == []
    assert steps_of(trace.folder) == []


def test_a_slow_disk_is_let_be_for_a_while(trace: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    now = began = time.monotonic()
    real = os.write

    def slow(descriptor: int, data: Any) -> int:
        nonlocal now
        now += 0.15
        return real(descriptor, data)

    at_once: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        patch.setattr(os, "write", slow)
        for moment in (0.0, 1.0, 2.0, 5.5, 11.0):
            now = began + moment
            at_once.append(trace._journals.append_at_once(Table.STEPS, step(len(at_once))))
    assert at_once == [True, False, False, True, False]
    assert steps_of(trace.folder) == [0, 3]


def test_one_slow_moment_is_no_slow_disk(trace: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    now = began = time.monotonic()
    real = os.write

    def slow_once(descriptor: int, data: Any) -> int:
        nonlocal now
        now += 0.05 if now == began else 0.0
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        patch.setattr(os, "write", slow_once)
        assert all(trace._journals.append_at_once(Table.STEPS, step(number)) for number in range(4))
    assert steps_of(trace.folder) == [0, 1, 2, 3]


def test_a_misfit_is_told_by_the_thread(run_folder: Path) -> None:
    notices: list[str] = []
    with _ready(TraceWriter(run_folder, manifest=Manifest(), on_notice=notices.append)) as trace:
        trace.put(Table.STEPS, [step(0), step(1)])
        assert trace.flush()
        trace.put(Table.STEPS, [step(0.5)])  # type: ignore[arg-type]  # that is the point
        trace.put(Table.STEPS, [step(2)])
    assert steps_of(run_folder) == [0, 1, 2]
    (notice,) = notices
    assert "A row of the table steps could not be written" in notice


def test_a_full_disk_ends_the_writing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[BaseException] = []
    with _ready(TraceWriter(run_folder, manifest=Manifest(), on_failure=failures.append)) as trace:
        trace.put(Table.STEPS, [step(0)])

        def full(_: int, __: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            trace.put(Table.STEPS, [step(1)])
            assert not trace.flush()
        trace.put(Table.STEPS, [step(2)])
    assert steps_of(run_folder) == [0]
    assert [type(each) for each in failures] == [OSError]


def test_an_interrupted_write_tears_nothing(trace: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+C with half of a row on its way: what comes later is read all the same."""
    real = os.write

    def interrupted(descriptor: int, data: Any) -> int:
        real(descriptor, bytes(data)[:100])
        raise KeyboardInterrupt

    trace.put(Table.STEPS, [step(0)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trace.put(Table.STEPS, [step(1)])
    trace.put(Table.STEPS, [step(2)])
    assert steps_of(trace.folder) == [0, 2]


def test_a_row_that_a_collection_leaves_meanwhile(trace: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that runs inside the write: its row is not put into the middle of the other's."""
    real = Journal.append_message

    class Left:
        def __del__(self) -> None:
            trace.put(Table.STEPS, [step(2)])

    def collecting(self: Journal, message: Any, rows: int) -> None:
        monkeypatch.setattr(Journal, "append_message", real)
        each = Left()
        del each
        gc.collect()
        real(self, message, rows)

    monkeypatch.setattr(Journal, "append_message", collecting)
    trace.put(Table.STEPS, [step(1)])
    assert trace.flush()
    assert steps_of(trace.folder) == [1, 2]


def test_rows_of_several_threads_all_arrive(trace: TraceWriter) -> None:
    def put_one_by_one(first: int) -> None:
        for number in range(first, first + 50):
            trace.put(Table.STEPS, [step(number)])

    threads = [threading.Thread(target=put_one_by_one, args=(first,)) for first in range(0, 200, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.flush()
    assert sorted(steps_of(trace.folder)) == list(range(200))


def test_after_close_nothing_is_written(trace: TraceWriter) -> None:
    trace.put(Table.STEPS, [step(0)])
    trace.close()
    trace.put(Table.STEPS, [step(1)])
    assert steps_of(trace.folder) == [0]


def test_whoever_trains_does_not_wait_for_a_disk_that_something_else_is_written_to(
    trace: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, goes_on = threading.Event(), threading.Event()
    real = Journal.append

    def stuck(journal: Journal, batch: Any) -> None:
        writing.set()
        assert goes_on.wait(30)
        real(journal, batch)

    monkeypatch.setattr(Journal, "append", stuck)
    trace.put(Table.EVENTS, [EventRow(0, 0, 1.0, "note", "")])
    assert writing.wait(30)
    trace.put(Table.STEPS, [step(0)])
    assert steps_of(trace.folder) == [0]
    trace.put(Table.STEPS, [step(1), step(2)])  # by the queue
    goes_on.set()
    assert trace.flush()
    assert steps_of(trace.folder) == [0, 1, 2]


def test_a_run_may_be_closed_by_a_handler_that_runs_while_a_row_is_appended(
    trace: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Journal.append_message

    def interrupted(journal: Journal, message: Any, rows: int) -> None:
        real(journal, message, rows)
        if threading.current_thread() is threading.main_thread():
            trace.close()

    monkeypatch.setattr(writing_threads, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(Journal, "append_message", interrupted)
    trace.put(Table.STEPS, [step(0)])
    assert not trace.failure
    assert steps_of(trace.folder) == [0]
    with open_run(trace.folder) as run:
        assert run.status == "closed"
