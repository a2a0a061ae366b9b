"""``ampscope fleet``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import validate

from ampscope.analysis.diagnosis.fleet_results import Fleet
from ampscope.cli.verdict_cache import VerdictCache
from ampscope.report.json import schema_of
from tests.support.command import Command
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.fleet_builder import Trained, build


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build(tmp_path / "fleet", [Trained(), Trained(day=8, host="node-[2]", lost=2, misuse=True)])


def test_text_answers_each_question(ampscope: Command, path: Path) -> None:
    told = ampscope("fleet", path).out
    for said in ("2 runs", "misuse_clip_before_unscale", "train.py:10", "node-[2]", "0.02 hours of devices"):
        assert said in told


def test_json_is_as_its_schema_says(ampscope: Command, path: Path) -> None:
    found = json.loads(ampscope("fleet", path, "--json").out)
    validate(found, schema_of(Fleet))
    assert found["lost"]["lost"] == 2


def test_no_run_is_an_error_that_says_where(ampscope: Command, tmp_path: Path) -> None:
    answer = ampscope("fleet", tmp_path)
    assert answer.code == 2
    assert "no run below" in answer.err


def test_a_verdict_is_kept_until_the_run_grows(ampscope: Command, path: Path, tmp_path: Path) -> None:
    ampscope("fleet", path)
    run = path / "day 8" / "run-1"
    cache = VerdictCache()
    assert cache.get(run) is not None
    builder = TraceBuilder(run)
    builder.step()
    builder.close()
    assert cache.get(run) is None
    cache.close()


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = VerdictCache(tmp_path / "file" / "verdicts.sqlite")
    assert cache.get(tmp_path) is None
    cache.close()
