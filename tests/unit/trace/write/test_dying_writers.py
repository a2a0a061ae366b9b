"""Processes that die, fork or forget to close: what they had written is there, and nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.files.journal import Journal, read_journal, to_batch
from ampscope.trace.files.layout import journal_path, list_table, table_folder
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import EventRow, Table, arrow_schema
from ampscope.trace.write import sealing
from tests.support.trace_builder import START, TraceBuilder

posix = pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")

PROLOGUE = """
import os, signal, sys
from ampscope.trace.manifest import Manifest
from ampscope.trace.write.writing_threads import SealAt
from ampscope.trace.schema import EventRow, Table
from ampscope.trace.write.writer import TraceWriter

def event(step):
    return EventRow(step, 0, float(step), "note", "")

trace = TraceWriter(sys.argv[1], manifest=Manifest(), seal_at=SealAt(batches=7))
"""


def child(folder: Path, code: str) -> subprocess.Popen[str]:
    program = PROLOGUE + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def steps_of(folder: Path) -> list[int]:
    with open_run(folder) as run:
        return [row.step for row in run.rows(Table.EVENTS)]


@posix
@pytest.mark.parametrize("lines", [1, 6, 7, 8, 30])
def test_a_kill_loses_nothing_that_was_flushed(run_folder: Path, lines: int) -> None:
    process = child(
        run_folder,
        """
        for step in range(100_000):
            trace.put(Table.EVENTS, [event(step)])
            assert trace.flush()
            print(step, flush=True)
        """,
    )
    assert process.stdout is not None
    for _ in range(lines):
        flushed = int(process.stdout.readline())
    process.kill()
    rest = process.stdout.read().split()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    flushed = int(rest[-1]) if rest and rest[-1].isdigit() else flushed
    steps = steps_of(run_folder)
    assert steps == list(range(len(steps)))
    assert flushed <= len(steps) <= flushed + 2 + 1
    assert open_run(run_folder).status == "interrupted"


@posix
def test_what_a_killed_process_left_is_sealed_by_the_next(run_folder: Path) -> None:
    process = child(
        run_folder,
        """
        trace.put(Table.EVENTS, [event(0)])
        trace.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert finish(process)[0] == -signal.SIGKILL
    folder = table_folder(run_folder, 0, Table.EVENTS)
    assert list(list_table(folder).journals) == [0]
    TraceBuilder(run_folder).close()
    listing = list_table(folder)
    assert (list(listing.parts), list(listing.journals)) == ([0], [])
    assert steps_of(run_folder) == [0]


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(3)",
        "raise ValueError",
        "trace.keep = trace",
        "import threading; threading.Thread(target=print).start()",
    ],
)
def test_the_interpreters_exit_closes(run_folder: Path, end: str) -> None:
    code = f"for step in range(20): trace.put(Table.EVENTS, [event(step)])\nsys.stderr = None\n{end}"
    finish(child(run_folder, code))
    assert read_manifest(run_folder).closed is not None
    assert steps_of(run_folder) == list(range(20))
    assert not list(run_folder.rglob("*.arrow"))


@posix
def test_a_forked_child_writes_nothing_and_does_not_hang(run_folder: Path) -> None:
    process = child(
        run_folder,
        """
        trace.put(Table.EVENTS, [event(0)])
        pid = os.fork()
        if pid == 0:
            trace.put(Table.EVENTS, [event(100)])
            assert not trace.flush()
            trace.close()
            del trace
            sys.exit(0)  # runs the exit handlers, too
        assert os.waitpid(pid, 0)[1] == 0
        trace.put(Table.EVENTS, [event(1)])
        assert trace.flush()
        trace.close()
        print("parent closed")
        """,
    )
    assert finish(process) == (0, "parent closed\n")
    assert steps_of(run_folder) == [0, 1]


@posix
def test_a_child_forked_while_rows_wait_does_not_hang(run_folder: Path) -> None:
    process = child(
        run_folder,
        """
        for step in range(200):
            trace.put(Table.EVENTS, [event(step)])
            if step % 20 == 0:
                pid = os.fork()
                if pid == 0:
                    trace.put(Table.EVENTS, [event(1000)])
                    sys.exit(0)
                assert os.waitpid(pid, 0)[1] == 0
        """,
    )
    assert finish(process) == (0, "")
    assert steps_of(run_folder) == list(range(200))


@posix
def test_a_child_that_outlives_its_parent_does_not_keep_the_run_open(run_folder: Path) -> None:
    process = child(
        run_folder,
        """
        trace.put(Table.EVENTS, [event(0)])
        trace.flush()
        if os.fork() == 0:
            os.close(1)
            os.read(0, 1)  # waits until the test ends
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert finish(process)[0] == -signal.SIGKILL
    assert open_run(run_folder).status == "interrupted"
    TraceBuilder(run_folder).close()
    assert open_run(run_folder).status == "closed"


class TestInstantsOfSealing:
    """The states that a death may leave between the steps of sealing."""

    def journal(self, run: Path, number: int, *steps: int) -> Path:
        folder = table_folder(run, 0, Table.EVENTS)
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(journal_path(folder, number), arrow_schema(Table.EVENTS))
        if steps:
            journal.append(to_batch(Table.EVENTS, [EventRow(step, 0, START + step, "note", "") for step in steps]))
        journal.close()
        return journal.path

    def run_with(self, run: Path, **columns: Any) -> Path:
        builder = TraceBuilder(run)
        builder.event(**columns)
        return builder.close()

    def test_part_and_journal_are_not_read_twice(self, run_folder: Path) -> None:
        self.run_with(run_folder, step=0)
        journal = self.journal(run_folder, 0, 0)
        assert steps_of(run_folder) == [0]
        TraceBuilder(run_folder).close()
        assert not journal.exists()
        assert steps_of(run_folder) == [0]

    def test_a_half_written_part_does_not_count(self, run_folder: Path) -> None:
        self.run_with(run_folder, step=0)
        journal = self.journal(run_folder, 1, 1)
        temporary = journal.with_name("part-000001.parquet.tmp")
        temporary.write_bytes(b"PAR1 and then nothing")
        assert steps_of(run_folder) == [0, 1]
        TraceBuilder(run_folder).close()
        assert not temporary.exists()
        assert steps_of(run_folder) == [0, 1]

    def test_a_journal_torn_within_its_first_bytes(self, run_folder: Path) -> None:
        self.run_with(run_folder, step=0)
        journal = self.journal(run_folder, 1, 1)
        journal.write_bytes(journal.read_bytes()[:10])
        assert steps_of(run_folder) == [0]
        TraceBuilder(run_folder).close()
        assert not journal.exists()
        assert list(list_table(journal.parent).parts) == [0]

    def test_an_empty_journal(self, run_folder: Path) -> None:
        self.run_with(run_folder, step=0)
        journal = self.journal(run_folder, 1)
        assert steps_of(run_folder) == [0]
        assert sealing.seal(journal) is None
        assert not journal.exists()

    @pytest.mark.parametrize("instant", ["fsync", "replace", "unlink"])
    def test_a_death_at_any_step_keeps_the_rows_once(
        self, run_folder: Path, instant: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.run_with(run_folder, step=0)
        journal = self.journal(run_folder, 1, 1, 2)

        class Death(BaseException):
            pass

        def die(*_: object, **__: object) -> None:
            raise Death

        owner = os if instant == "fsync" else Path
        with monkeypatch.context() as patch:
            patch.setattr(owner, instant, die)
            with pytest.raises(Death):
                sealing.seal(journal)
        assert steps_of(run_folder) == [0, 1, 2]
        TraceBuilder(run_folder).close()
        assert steps_of(run_folder) == [0, 1, 2]
        assert sorted(path.name for path in journal.parent.iterdir()) == ["part-000000.parquet", "part-000001.parquet"]

    def test_the_rows_of_a_journal_torn_anywhere_are_sealed(self, run_folder: Path) -> None:
        path = self.journal(run_folder, 0, 0)
        content = path.read_bytes()
        path.write_bytes(content + content[-100:-50])
        part = sealing.seal(path)
        assert part is not None
        assert not path.exists()
        with pytest.raises(FileNotFoundError):
            read_journal(path)
