"""A run goes to a real S3 server whose network fails: nothing that was sealed is lost, and no row waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.trace.location import BucketPath, location
from ampscope.trace.manifest import Manifest
from ampscope.trace.object_store import new_store
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from ampscope.trace.upload.spool import spool_of
from ampscope.trace.upload.sync import Pace
from ampscope.trace.upload.uploader import Uploader
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt
from tests.support.stores.s3_server import BUCKET, Fault, S3Server, random_faults
from tests.support.trace_builder import TraceBuilder

#: A fiftieth of what is waited for in earnest.
QUICK = Pace(look=0.02, journal=0.05, mark=1.0, leftovers=0.2, first=0.01, most=0.05, close=60.0, stalled=30.0)
#: Faults that are injected into one run.
FAULTS = 200
MANIFEST = Manifest(name="run", created=1_700_000_000.0)


def remote(home: str, told: list[str], pace: Pace = QUICK) -> TraceWriter:
    run = location(home)
    assert isinstance(run, BucketPath)
    spool = spool_of(run)
    uploader = Uploader(
        spool, run, 0, budget=1 << 30, tell=told.append, pace=pace, opened=lambda: new_store("s3", tries=1)
    )
    return TraceWriter(spool, manifest=MANIFEST, follower=uploader, seal_at=SealAt(rows=8))


def write(builder: TraceBuilder, number: int) -> None:
    builder.step(loss=number / 7)
    builder.op(step=number, source="live", max=float(number))
    builder.event(step=number, text=f"step {number}")


@pytest.mark.slow
def test_nothing_sealed_is_lost_through_faults_of_every_kind(s3: S3Server, tmp_path: Path) -> None:
    told: list[str] = []
    s3.fail(random_faults(seed=7, count=FAULTS))
    writer = remote(f"s3://{BUCKET}/faults/run", told)
    here, there = TraceBuilder(tmp_path / "here", created=MANIFEST.created), TraceBuilder.of(writer)
    number = 0
    while s3.injected.total() < FAULTS:
        assert number < 2000, s3.injected
        asked = s3.asked.total()
        for builder in (here, there):
            write(builder, number)
        assert writer.flush()  # what is left is the disk's, whatever the network does
        number += 1
        s3.wait_for_request_after(asked, seconds=1.0)
    there.close()
    here.close()
    assert s3.injected.total() == FAULTS
    assert set(s3.injected) == set(Fault)
    assert writer.failure is None
    assert len(told) == 1, told
    assert not writer.folder.exists()
    with open_run(here.folder) as local, open_run(f"s3://{BUCKET}/faults/run") as run:
        assert [run.status] == ["closed"]
        for table in Table:
            assert repr(run.rows(table)) == repr(local.rows(table))
        assert len(run.rows(Table.STEPS)) == number


@pytest.mark.slow
@pytest.mark.parametrize("fault", Fault)
def test_one_fault_of_each_kind(s3: S3Server, fault: Fault) -> None:
    told: list[str] = []
    s3.fail([fault] * 2)
    builder = TraceBuilder.of(remote(f"s3://{BUCKET}/one/run", told))
    for number in range(6):
        write(builder, number)
    builder.close()
    assert s3.injected[fault] == 2
    with open_run(f"s3://{BUCKET}/one/run") as run:
        assert len(run.rows(Table.STEPS)) == 6


def test_rows_are_taken_while_the_store_hangs(s3: S3Server) -> None:
    told: list[str] = []
    writer = remote(f"s3://{BUCKET}/hangs/run", told)
    builder = TraceBuilder.of(writer)
    s3.stall()
    assert s3.stalled.wait(10)  # a request is being held
    for number in range(50):
        write(builder, number)
    assert writer.flush()
    assert s3.stalled.is_set()
    s3.release()
    builder.close()
    with open_run(f"s3://{BUCKET}/hangs/run") as run:
        assert len(run.rows(Table.STEPS)) == 50
