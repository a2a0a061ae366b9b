"""What is told of a fleet is the same whichever engine adds up its tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ampscope.analysis.diagnosis.fleet import Diagnosed, fleet
from ampscope.analysis.diagnosis.fleet_results import Fleet
from ampscope.analysis.diagnosis.fleet_steps import step_sums
from ampscope.trace.files.journal import to_batch
from ampscope.trace.fleet_tables import FleetTables
from ampscope.trace.read.duckdb_engine import Pieces
from ampscope.trace.read.find import runs_below
from ampscope.trace.read.part_columns import of_rank
from ampscope.trace.schema import EventKind, EventRow, Table
from tests.integration.samples.engines.recorded_runs import RANKS, STEPS, hard_run
from tests.integration.samples.engines.sameness import differences
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.fleet_builder import Trained, build

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Closed runs, one of them of two ranks, one with losses and a duration that are no numbers, and two open ones.

    One closed run comes between the two open ones, so that what is loaded of it is empty.
    """
    folder = tmp_path_factory.mktemp("a+b, 100% {of} [them], ü, rank=7")
    trained = [Trained(), Trained(day=8, host="node-2", lost=3, misuse=True), Trained(day=9, collapses=True)]
    build(folder, [*trained, Trained(day=9, device="cpu", ranks=2, world_size=4, lost=2)])
    odd = TraceBuilder(folder / "odd")
    for step in range(60):
        duration = math.nan if step == 41 else 0.5
        odd.step(skipped=step % 2 == 1, duration_s=duration, scale=None if step % 5 == 4 else 2.0**step, loss=math.nan)
    odd.close()
    writing = [*hard_run(folder / "hard"), TraceBuilder(folder / "young")]
    writing[-1].step()  # a run whose only row is in its journal
    writing[-1].leave_open()
    yield runs_below([folder])
    for builder in writing:
        builder.close()


@pytest.fixture(scope="module")
def found(runs: list[Path], spark: Any) -> list[Fleet]:
    return [fleet(runs, engine=engine, diagnosed=Diagnosed.ALL) for engine in ("duckdb", spark)]


def test_engines_agree(found: list[Fleet]) -> None:
    one, other = found
    assert list(differences(one, other)) == []
    assert one.unreadable == ()


def test_every_row_is_counted_once_journaled_ones_too(runs: list[Path], spark: Any) -> None:
    for engine in ("duckdb", spark):
        with FleetTables(runs, engine) as tables:
            steps = {(Path(each.run).name, each.rank, each.optimizer): each.steps for each in step_sums(tables)}
        assert steps["young", 0, 0] == 1
        assert steps["odd", 0, 0] == 60
        hard = [steps["hard", rank, optimizer] for rank in range(RANKS) for optimizer in range(2)]
        assert hard == [STEPS] * len(hard)
        assert sum(steps.values()) == 1 + 60 + STEPS * RANKS * 2 + 5 * 40


def test_the_command_asks_the_session_that_is_there(
    runs: list[Path], found: list[Fleet], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, capsys)
    answer = command("fleet", *runs, "--engine", "spark", "--no-cache", "--json", "--diagnose", "none")
    assert answer.code == 0
    told = json.loads(answer.out)
    assert told["lost"]["steps"] == found[1].lost.steps
    assert told["collapsed_runs"] == found[1].collapsed_runs


def test_of_rows_that_come_in_pieces_none_is_lost_behind_an_empty_one(spark: Any) -> None:
    written = to_batch(Table.EVENTS, [EventRow(0, 0, 0.0, EventKind.NOTE, "")])
    row = of_rank(pa.Table.from_batches([written]), 0)
    rows = pa.concat_tables([row, row.slice(0, 0), row, row.slice(0, 0), row.slice(0, 0), row])
    from ampscope.trace.read.spark import SparkTables  # loads pyspark, which may not be there

    tables = SparkTables(spark)
    assert tables.frame(0, Table.EVENTS, lambda: Pieces({}, rows)).count() == 3
    tables.close()


@pytest.mark.parametrize(
    ("file", "rank", "run"),
    [
        ("file:///runs/rank=7/a%20b+c/rank%3D3/steps/part-000000.parquet", 3, "/runs/rank=7/a b+c"),
        ("s3a://bucket/runs/a%2520b/rank=12/ops/part-000001-000004.parquet", 12, "s3://bucket/runs/a%20b"),
    ],
)
def test_a_file_tells_its_run_as_it_was_given(spark: Any, file: str, rank: int, run: str) -> None:
    from ampscope.trace.read.spark import RANK_OF_PART, RUN_OF_PART

    (row,) = (
        spark.sql(f"SELECT named_struct('file_path', '{file}') AS _metadata")
        .selectExpr(RANK_OF_PART, RUN_OF_PART)
        .collect()
    )
    assert (row.rank, row.run) == (rank, run)
