"""A trace that is damaged or a stranger's is answered or refused in one line, never with a traceback.

``make soak`` does the same ten thousand times to every sample.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.run_list import run_summaries
from ampscope.analysis.precision.precision import precision
from ampscope.errors import AmpscopeError, RunDamaged
from ampscope.report.html.report_page import page_of
from ampscope.report.json import as_json
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from tests.integration.samples.mutations import injured
from tests.support.paths import SAMPLES
from tests.support.scenes import overflow
from tests.support.training.injuries.soak import Record, soaked

#: Injuries of the small run, in so many tests; and of each sample.
_SMALL, _TESTS = 240, 8
_SOAK = 10_000
#: All are opened and read; each so many is diagnosed, and each so many of those shown as a page.
_DIAGNOSED, _PAGES = 8, 5


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some steps with an incident, its replay and a finding."""
    return overflow(tmp_path_factory.mktemp("small") / "run").close()


@pytest.mark.parametrize("first", range(_TESTS))
def test_a_small_run(small: Path, tmp_path: Path, first: int) -> None:
    for number in range(first, _SMALL, _TESTS):
        _survives(small, tmp_path / "run", number, diagnosed=number % _DIAGNOSED == 0)


def test_what_is_not_injured_is_read_and_a_wrong_type_is_named(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small, run)
    _read(run)
    part = run / "rank=0" / "steps" / "part-000000.parquet"
    with pq.ParquetFile(part) as file:
        rows = file.read()
    pq.write_table(rows.set_column(0, "step", pa.array(["x"] * rows.num_rows)), part)
    with pytest.raises(RunDamaged, match="its column 'step' is of type string, not int64"):
        diagnose(run)
    pq.write_table(rows.drop_columns("step"), part)
    with pytest.raises(RunDamaged, match="it lacks the column 'step'"):
        diagnose(run)
    pq.write_table(rows.set_column(0, "step", rows["step"]), part)
    with pytest.raises(RunDamaged, match="its column 'step' may be null"):
        diagnose(run)


@pytest.mark.parametrize(
    ("table", "column"),
    [("replays", "change"), ("replays", "outcome"), ("sites", "phase"), ("sites", "cast"), ("scaler_events", "action")],
)
def test_a_word_that_no_ampscope_has_written_ends_nothing(tmp_path: Path, table: str, column: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(SAMPLES / "attention-overflow", run)
    parts = sorted(run.glob(f"rank=0/{table}/*.parquet"))
    assert parts
    for part in parts:
        with pq.ParquetFile(part) as file:
            rows = file.read()
        foreign = pa.array(["foreign"] * rows.num_rows, rows.schema.field(column).type)
        pq.write_table(rows.set_column(rows.column_names.index(column), rows.schema.field(column), foreign), part)
    _tell(run, page=True)
    with open_run(run) as opened:
        precision(opened)


@pytest.mark.parametrize(
    ("sample", "number"),
    [
        pytest.param("attention-overflow", 22239, id="too few shapes"),
        pytest.param("attention-overflow", 23225, id="no shapes"),
        pytest.param("attention-overflow", 60191, id="a tiny loss scale"),
        pytest.param("healthy", 439, id="more than can be counted"),
        pytest.param("log-zero", 264, id="an exponent beyond all numbers"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_injury_that_once_ended_in_a_traceback(tmp_path: Path, sample: str, number: int) -> None:
    _survives(SAMPLES / sample, tmp_path / "run", number, diagnosed=True)
    with suppress(AmpscopeError):
        _tell(tmp_path / "run", page=True)


def test_a_small_file_of_many_rows_is_not_read(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small, run)
    part = run / "rank=0" / "steps" / "part-000000.parquet"
    with pq.ParquetFile(part) as file:
        row = file.read().slice(0, 1)
    many = pa.array([0] * 300_000)
    pq.write_table(row.take(many), part, compression="zstd")
    with pytest.raises(RunDamaged, match=r"declares 300,000 rows; of such a file up to \d+,\d+ are read"):
        diagnose(run)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("sample", sorted(manifest.parent.name for manifest in SAMPLES.glob("*/run.json")))
def test_a_sample(sample: str, tmp_path: Path, record_property: Record) -> None:
    survived = 0
    try:
        for number in range(_SOAK):
            _survives(SAMPLES / sample, tmp_path / "run", number, diagnosed=True)
            survived += 1
    finally:
        soaked(record_property, "injuries to samples: a traceback", survived, int(survived < _SOAK))


def _survives(source: Path, folder: Path, number: int, *, diagnosed: bool) -> None:
    injury = injured(source, folder, number)
    try:
        _read(folder)
        if diagnosed:
            _tell(folder, page=number % (_DIAGNOSED * _PAGES) == 0)
    except AmpscopeError:
        pass
    except Exception as error:
        error.add_note(f"injury {number}: {injury}")
        raise


def _read(run: Path) -> None:
    run_summaries([run])
    with open_run(run) as opened:
        for table in Table:
            opened.rows(table)


def _tell(run: Path, *, page: bool) -> None:
    json.loads(as_json(diagnose(run)))
    if page:
        assert page_of(run).startswith("<!")
