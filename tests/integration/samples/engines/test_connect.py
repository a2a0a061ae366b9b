"""A Spark Connect server, asked by its address, says what DuckDB says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.analysis.diagnosis.fleet import Diagnosed, fleet
from ampscope.analysis.overview.rank_lives import ranks_at_a_glance
from ampscope.analysis.precision.ranges.ranges import ranges
from ampscope.analysis.scale.scale_history import scale_history
from ampscope.analysis.tables.lazy_tables import collect
from ampscope.errors import EngineError
from ampscope.trace.read.find import runs_below
from ampscope.trace.read.run import Run, open_run
from ampscope.trace.schema import GROWING_TABLES, Table
from tests.integration.samples.engines.recorded_runs import hard_run
from tests.integration.samples.engines.sameness import differences
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server that is there for this module."""
    pytest.importorskip("pyspark.sql.connect.session", reason="Spark Connect is not installed")
    from tests.integration.samples.engines.connect_server import connect_server

    with connect_server() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that is still being written, and a closed one, below a folder with a hard name."""
    folder = tmp_path_factory.mktemp("a+b, 100% {of} [them]")
    builder = TraceBuilder(folder / "closed")
    builder.step(skipped=True)
    builder.close()
    writing = hard_run(folder / "hard")
    yield folder
    for each in writing:
        each.close()


@pytest.fixture(scope="module")
def pair(folder: Path, address: str) -> Iterator[tuple[Run, Run]]:
    with open_run(folder / "hard") as one, open_run(folder / "hard", engine=address) as other:
        yield one, other


def test_tables_have_the_same_rows(pair: tuple[Run, Run]) -> None:
    for table in GROWING_TABLES:
        one, other = (sorted(repr(list(row.values())) for row in collect(run.table(table))) for run in pair)
        assert one == other
        assert one or table is Table.AUDIT_OPS


def test_analyses_are_the_same(pair: tuple[Run, Run]) -> None:
    one, other = ((ranges(run), scale_history(run), ranks_at_a_glance(run)) for run in pair)
    assert list(differences(one, other)) == []


def test_a_fleet_is_the_same(folder: Path, address: str) -> None:
    runs = runs_below([folder])
    one, other = (fleet(runs, engine=engine, diagnosed=Diagnosed.NONE) for engine in ("duckdb", address))
    assert list(differences(one, other)) == []
    assert one.lost.steps == 1 + 3 * 2 * 48


def test_a_command_takes_the_address(
    folder: Path, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, capsys)
    told = [command("diagnose", folder / "hard", "--engine", each, "--json") for each in ("duckdb", address)]
    assert told[0] == told[1]
    assert told[0].out


def test_an_address_at_which_nobody_is_is_told(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"Spark Connect at sc://127\.0\.0\.1:1 does not answer"):
        open_run(folder / "hard", engine="sc://127.0.0.1:1")
