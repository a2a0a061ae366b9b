"""The recorded sample runs open under today's schema and are still diagnosed as their stories say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ampscope
from ampscope.analysis.diagnosis.diagnosis import judged
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import MANIFEST, SCHEMA_VERSION, Table
from ampscope.trace.vocabulary import Cause, Severity
from tests.support.paths import SAMPLES

EXPECTED: dict[str, dict[str, Any]] = json.loads((SAMPLES / "expected.json").read_text())
LIMIT = 1_000_000  #: bytes
#: Where people's own folders lie; a trace must not carry them.
PRIVATE = re.compile(r"/(home|root|Users|tmp|private|work)/")


@pytest.fixture(scope="module", params=EXPECTED)
def sample(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def run(sample: str) -> ampscope.Run:
    return ampscope.open_run(SAMPLES / sample)


@pytest.fixture(scope="module")
def diagnosis(run: ampscope.Run) -> Diagnosis:
    return ampscope.diagnose(run)


def test_every_sample_has_a_story_and_an_expectation() -> None:
    recorded = {manifest.parent.name for manifest in SAMPLES.glob(f"*/{MANIFEST}")}
    assert recorded == set(EXPECTED)
    stories = (SAMPLES / "README.md").read_text()
    assert [name for name in recorded if f"`{name}`" not in stories] == []


def test_it_opens_under_todays_schema(sample: str, run: ampscope.Run) -> None:
    assert json.loads((SAMPLES / sample / MANIFEST).read_text())["schema"] <= SCHEMA_VERSION
    rows = {table: run.rows(table) for table in Table}
    assert [row.step for row in run.rows(Table.STEPS)] == list(range(len(rows[Table.STEPS])))
    assert rows[Table.SITES]
    assert rows[Table.OPS]


def test_the_verdict_is_the_storys(sample: str, diagnosis: Diagnosis) -> None:
    expected = EXPECTED[sample]
    assert diagnosis.verdict == expected["verdict"]
    assert [finding.cause for finding in diagnosis.findings] == expected["findings"]
    for fact in ("steps", "skipped"):
        if fact in expected:
            assert getattr(diagnosis.run, fact) == expected[fact]


def test_the_primary_is_the_storys(sample: str, diagnosis: Diagnosis) -> None:
    expected, primary = EXPECTED[sample]["primary"], diagnosis.primary
    if expected is None:
        assert primary is None
        return
    assert primary is not None
    said = {name: getattr(primary, name) for name in expected if hasattr(primary, name)}
    if primary.source is not None:
        said |= {"file": Path(primary.source.file).name}
        said |= {"function": primary.source.function, "code": primary.source.code}
    assert said == expected


def test_the_verdict_alone_is_the_same(run: ampscope.Run, diagnosis: Diagnosis) -> None:
    alone = judged(run)
    assert (alone.verdict, alone.summary, alone.findings) == (diagnosis.verdict, diagnosis.summary, diagnosis.findings)
    told = [replace(each, last_good=None) for each in diagnosis.incidents if each.severity is not Severity.INFO]
    assert [each for each in alone.incidents if each.severity is not Severity.INFO] == told
    whole = diagnosis.primary
    assert alone.primary == (replace(whole, last_good=None) if isinstance(whole, Incident) else whole)


def test_what_is_harmless_is_called_so(sample: str, diagnosis: Diagnosis) -> None:
    harmless = {incident.cause for incident in diagnosis.incidents if incident.cause.is_benign}
    assert harmless == {Cause(cause) for cause in EXPECTED[sample].get("harmless", harmless)}
    if diagnosis.primary is not None:
        assert not diagnosis.primary.cause.is_benign


def test_it_is_small(sample: str) -> None:
    assert sum(file.stat().st_size for file in (SAMPLES / sample).rglob("*") if file.is_file()) < LIMIT


def test_it_carries_no_private_path(sample: str, run: ampscope.Run) -> None:
    written = [(SAMPLES / sample / MANIFEST).read_text(), *(str(row) for table in Table for row in run.rows(table))]
    assert [text for text in written if PRIVATE.search(text)] == []
