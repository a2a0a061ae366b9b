"""A run that goes to an object store: all of it arrives, through faults, and nothing is left of the spool then."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampscope.errors import RunUnreachable
from ampscope.trace import object_store
from ampscope.trace.files.folder_lock import LOCK_FILE, is_locked
from ampscope.trace.files.layout import rank_folder
from ampscope.trace.location import BucketPath, location
from ampscope.trace.manifest import Manifest
from ampscope.trace.object_store import Store, new_store
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from ampscope.trace.upload.opening import open_remote
from ampscope.trace.upload.spool import VARIABLE, home_of, spool_of, waiting
from ampscope.trace.upload.sync import Pace, send_left
from ampscope.trace.upload.uploader import Uploader
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt
from tests.support.command import Command
from tests.support.stores.buckets import memory_bucket, objects
from tests.support.trace_builder import TraceBuilder

#: A thousandth of what is waited for in earnest.
QUICK = Pace(look=0.01, journal=0.01, mark=0.05, leftovers=0.01, first=0.001, most=0.01, close=20.0, stalled=5.0)


@pytest.fixture(autouse=True)
def spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(object_store, "HOLDS_S", 0.0)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "spools"))
    return tmp_path / "spools"


@pytest.fixture
def home() -> Iterator[BucketPath]:
    with memory_bucket() as url:
        run = location(f"{url}/run")
        assert isinstance(run, BucketPath)
        yield run


class Flaky(Store):
    """A store in memory whose calls fail as they are told to."""

    def __init__(self) -> None:
        inner = new_store("memory")
        super().__init__("memory", inner._files)
        self.is_down = False
        self.hold = threading.Event()
        self.hold.set()
        self.holding = threading.Event()
        self.tries = 0

    def write(self, content: bytes, url: str) -> None:
        self._meet(url)
        super().write(content, url)

    def tree(self, url: str) -> Any:
        self._meet(url)
        return super().tree(url)

    def _meet(self, url: str) -> None:
        self.tries += 1
        if not self.hold.is_set():
            self.holding.set()
            self.hold.wait(30)
        if self.is_down:
            raise RunUnreachable(f"{url} cannot be reached: the cable is cut.")


class Recorded:
    """A writer that sends to a store, with what it told."""

    def __init__(self, home: BucketPath, *, pace: Pace = QUICK, store: Store | None = None, **options: Any) -> None:
        self.told: list[str] = []
        self.store = store or Flaky()
        self.spool = spool_of(home)
        self.uploader = Uploader(
            self.spool,
            home,
            options.get("rank", 0),
            budget=options.get("disk_budget", 2 << 30),
            tell=self.told.append,
            pace=pace,
            opened=lambda: self.store,
            joined=options.pop("joined", True),
        )
        manifest = options.pop("manifest", Manifest(name="run", created=1_700_000_000.0))
        self.writer = TraceWriter(
            self.spool, manifest=manifest, follower=self.uploader, seal_at=SealAt(rows=5), **options
        )
        self.builder = TraceBuilder.of(self.writer)


def until(condition: Any, seconds: float = 10.0) -> None:
    event = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it has not come to that")


def steps_in(home: BucketPath) -> list[int]:
    with open_run(home) as run:
        return [row.step for row in run.rows(Table.STEPS)]


def test_all_arrives_and_the_spool_goes(home: BucketPath, spools: Path) -> None:
    run = Recorded(home)
    for _ in range(23):
        run.builder.step()
    run.builder.op()
    run.writer.close()
    with open_run(home) as opened:
        assert [opened.status] == ["closed"]
        assert [row.step for row in opened.rows(Table.STEPS)] == list(range(23))
        assert len(opened.rows(Table.OPS)) == 1
    assert run.told == []
    assert not run.spool.exists()
    assert not any(LOCK_FILE in name or "journal" in name for name in objects(str(home)))


def test_readers_see_a_run_while_it_is_written(home: BucketPath) -> None:
    run = Recorded(home)
    run.builder.step()
    assert run.writer.flush()
    until(lambda: (home / "run.json").exists() and home.is_dir() and f"rank=0/{LOCK_FILE}" in objects(str(home)))
    until(lambda: steps_in(home) == [0])
    with open_run(home) as opened:
        assert opened.status == "open"
    run.builder.step()
    assert run.writer.flush()
    until(lambda: steps_in(home) == [0, 1])
    run.writer.close()


def test_a_store_that_is_down_is_told_once_and_loses_nothing(home: BucketPath) -> None:
    store = Flaky()
    run = Recorded(home, store=store)
    store.is_down = True
    for _ in range(12):
        run.builder.step()
        assert run.writer.flush()
    before = store.tries
    until(lambda: store.tries > before + 3)
    assert len(run.told) == 1
    assert "the cable is cut" in run.told[0]
    assert str(run.spool) in run.told[0]
    store.is_down = False
    run.writer.close()
    assert steps_in(home) == list(range(12))
    assert len(run.told) == 1
    assert not run.spool.exists()


def test_a_store_that_hangs_holds_up_neither_rows_nor_for_long_the_end(home: BucketPath, ampscope: Command) -> None:
    store = Flaky()
    store.hold.clear()
    run = Recorded(home, store=store, pace=Pace(look=0.01, stalled=0.05, close=0.2))
    assert store.holding.wait(10)
    for _ in range(50):
        run.builder.step()
    assert run.writer.flush()  # in the journal, though nothing has been sent
    run.writer.close()
    assert f"ampscope upload {run.spool}" in run.told[-1]
    assert not is_locked(rank_folder(run.spool, 0))  # another writer may go on
    assert waiting() == [run.spool]
    store.hold.set()
    run.uploader.thread.join(10)
    assert run.spool.exists()  # who woke up too late changes nothing any more
    told = ampscope("upload")
    assert told.code == 0, told.err
    assert steps_in(home) == list(range(50))
    assert waiting() == []
    assert "Nothing is left" in ampscope("upload").out


def test_what_a_killed_process_left_is_sent_by_the_next_writer(home: BucketPath) -> None:
    store = Flaky()
    store.is_down = True
    run = Recorded(home, store=store, pace=Pace(look=0.01, first=0.001, most=0.01, stalled=0.05, close=0.1))
    for _ in range(7):
        run.builder.step()
    run.writer.close()  # as a kill would, it leaves the spool
    assert run.spool.exists()
    again = Recorded(home)
    assert again.writer.resume.segment == 1
    assert again.writer.resume.next_step == {0: 7}
    again.builder.step()
    again.writer.close()
    assert steps_in(home) == list(range(8))


def test_journals_that_a_kill_left_are_sealed_and_sent(home: BucketPath) -> None:
    spool = spool_of(home)
    builder = TraceBuilder(spool, created=1_700_000_000.0)
    builder.step()
    folder = builder.leave_open()
    copied = {path: path.read_bytes() for path in folder.rglob("journal-*")}
    builder.close()
    for path, content in copied.items():
        path.write_bytes(content)
        path.with_name(path.name.replace("journal", "part").replace("arrow", "parquet")).unlink()
    sent = send_left(spool, lambda _: None)
    assert (sent.left, sent.home) == (0, home)
    assert steps_in(home) == [0]
    assert not spool.exists()


def test_a_run_goes_on_on_another_machine(home: BucketPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Recorded(home)
    for _ in range(11):
        first.builder.step()
        first.builder.op()
    first.writer.close()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "elsewhere"))
    told: list[str] = []
    writer = open_remote(home, manifest=Manifest(name="run"), on_notice=told.append, seal_at=SealAt(rows=5))
    assert writer.home == home
    assert (writer.resume.segment, writer.resume.next_step, writer.manifest.created) == (1, {0: 11}, 1_700_000_000.0)
    builder = TraceBuilder.of(writer)
    for _ in range(9):
        builder.step()
        builder.op()
    writer.close()
    assert told == []
    with open_run(home) as run:
        assert [row.step for row in run.rows(Table.STEPS)] == list(range(20))
        assert len(run.rows(Table.OPS)) == 20
        assert len(run.manifest.segments) == 2


def test_a_store_that_did_not_answer_at_the_start_holds_another_run(home: BucketPath) -> None:
    first = Recorded(home)
    first.builder.step()
    first.writer.close()
    second = Recorded(home, joined=False, manifest=Manifest(name="other", created=1_800_000_000.0))
    second.builder.step()
    second.builder.step()
    second.writer.close()
    assert steps_in(home) == [0]
    assert "holds another run" in second.told[0]
    assert steps_in(second.uploader.home) == [0, 1]
    assert second.uploader.home.parent == home.parent


def test_parts_that_were_merged_go_from_the_store(home: BucketPath) -> None:
    run = Recorded(home)
    for _ in range(100):
        run.builder.step()
        assert run.writer.flush()
    run.writer.close()
    names = [name for name in objects(str(home)) if name.startswith("rank=0/steps/")]
    assert len(names) < 20 // 2
    assert any("-" in Path(name).stem.removeprefix("part-") for name in names)
    assert steps_in(home) == list(range(100))


def test_bulk_parts_leave_the_spool_once_they_have_arrived(home: BucketPath) -> None:
    run = Recorded(home)
    for _ in range(8):
        run.builder.step()
        for _ in range(5):
            run.builder.op()
        assert run.writer.flush()
    ops = rank_folder(run.spool, 0) / Table.OPS.value
    until(lambda: len(list(ops.glob("part-*"))) == 1)
    with open_run(home) as opened:
        until(lambda: len(opened.rows(Table.OPS)) == 40)
    for _ in range(5):
        run.builder.op()
    run.writer.close()
    with open_run(home) as opened:
        assert len(opened.rows(Table.OPS)) == 45


def test_the_store_keeps_to_the_disk_budget(home: BucketPath) -> None:
    run = Recorded(home, disk_budget=40_000)
    for _ in range(30):
        run.builder.step()
        for _ in range(5):
            run.builder.op()
        assert run.writer.flush()
    run.writer.close()
    kept = objects(str(home))
    assert sum(len(content) for name, content in kept.items() if "/ops/" in name) < 40_000
    assert steps_in(home) == list(range(30))
    assert any("disk budget" in text for text in run.told)


def test_each_rank_sends_its_own_part(home: BucketPath) -> None:
    manifest = Manifest(name="run", world_size=2, created=1_700_000_000.0)
    zero, one = (Recorded(home, rank=rank, manifest=manifest) for rank in (0, 1))
    for run in (zero, one):
        run.builder.step()
    one.writer.close()
    assert zero.spool.exists()
    zero.writer.close()
    assert not zero.spool.exists()
    with open_run(home) as opened:
        assert opened.ranks == [0, 1]
        assert [opened.status] == ["closed"]
        assert len(opened.rows(Table.STEPS)) == 2


def test_what_went_on_elsewhere_is_not_written_over(home: BucketPath) -> None:
    store = Flaky()
    store.is_down = True
    stale = Recorded(home, store=store, pace=Pace(look=0.01, first=0.001, most=0.01, stalled=0.05, close=0.1))
    stale.builder.step(loss=1.0)
    stale.writer.close()
    aside = stale.spool.with_name("aside")
    stale.spool.rename(aside)
    fresh = Recorded(home)
    for _ in range(4):
        fresh.builder.step(loss=2.0)
    fresh.writer.close()
    there = objects(str(home))
    sent = send_left(aside, lambda _: None)
    assert sent.left > 0
    assert objects(str(home)) == there
    assert aside.exists()


def test_the_spool_is_the_users_alone_and_holds_no_secret(home: BucketPath) -> None:
    spool = spool_of(home)
    assert home_of(spool) == home
    assert spool_of(home) == spool
    if hasattr(os, "getuid"):
        assert spool.stat().st_mode & 0o077 == 0


def test_what_is_no_spool_is_told(tmp_path: Path, ampscope: Command) -> None:
    told = ampscope("upload", tmp_path)
    assert told.code == 2
    assert "is no spool" in told.err


def test_a_spool_that_is_being_written_is_left_alone(home: BucketPath, ampscope: Command) -> None:
    run = Recorded(home)
    assert waiting() == []
    told = ampscope("upload", run.spool)
    assert told.code == 2
    assert "is being written" in told.err
    run.writer.close()
