"""Of a large run in a bucket a question reads the columns and parts that it needs; counted where they are served."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ampscope.trace.manifest import Manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import OpRow, Table
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt
from tests.support.stores.s3_server import BUCKET, S3Server, client
from tests.support.trace_builder import TraceBuilder

#: Traced steps, and ops in each.
STEPS, OPS = 4, 40_000


pytestmark = pytest.mark.slow


@pytest.fixture
def large(s3: S3Server, tmp_path: Path) -> tuple[str, int]:
    """The URL of a run whose ops take nearly all its bytes, and how many its ops take."""
    writer = TraceWriter(tmp_path / "run", manifest=Manifest(name="large"), seal_at=SealAt(rows=OPS))
    builder, chance = TraceBuilder.of(writer), random.Random(0)
    builder.site(out_dtypes=("float16",))
    with TraceBuilder(tmp_path / "pattern").writer as other:
        TraceBuilder.of(other).op(step=0, source="live")
    with open_run(tmp_path / "pattern") as run:
        pattern: OpRow = run.rows(Table.OPS)[0]
    for step in range(STEPS):
        builder.step(traced="live")
        made = [
            pattern._replace(
                step=step,
                seq=seq + 1,
                checksum=chance.getrandbits(62),
                statistics=pattern.statistics._replace(min=-chance.random(), max=chance.random()),
            )
            for seq in range(OPS)
        ]
        builder.writer.put(Table.OPS, made)
        assert builder.writer.flush()
    folder, sent = builder.close(), client(s3)
    sizes = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            name = path.relative_to(folder).as_posix()
            sent.put_object(Bucket=BUCKET, Key=f"large/{name}", Body=path.read_bytes())
            sizes[name] = path.stat().st_size
    ops = sum(size for name, size in sizes.items() if "/ops/" in name)
    s3.served.clear()
    return f"s3://{BUCKET}/large", ops


def served(s3: S3Server, table: str) -> int:
    return sum(count for path, count in s3.served.items() if f"/{table}/" in path)


def test_a_question_about_steps_reads_no_op(s3: S3Server, large: tuple[str, int]) -> None:
    with open_run(large[0]) as run:
        assert len(run.rows(Table.STEPS)) == STEPS
    assert served(s3, "ops") == 0


def test_a_column_is_read_without_the_others(s3: S3Server, large: tuple[str, int]) -> None:
    url, size = large
    with open_run(url) as run:
        (found,) = run.sql("SELECT max(max) FROM ops").fetchall()
    assert 0.99 < found[0] <= 1.0
    assert 0 < served(s3, "ops") < 0.4 * size  # one of four that differ from row to row


def test_a_step_is_read_without_the_others(s3: S3Server, large: tuple[str, int]) -> None:
    url, size = large
    with open_run(url) as run:
        assert [row.seq for row in run.rows(Table.OPS, step=2, seq=5)] == [5]
    assert 0 < served(s3, "ops") < 0.5 * size  # a part of four, and footers


def test_what_was_read_is_not_read_again(s3: S3Server, large: tuple[str, int]) -> None:
    with open_run(large[0]) as run:
        for _ in range(2):
            run.sql("SELECT max(max) FROM ops").fetchall()
            first = served(s3, "ops")
        run.sql("SELECT max(max) FROM ops").fetchall()
        assert served(s3, "ops") == first
