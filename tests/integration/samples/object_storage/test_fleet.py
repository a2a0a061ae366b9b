"""A fleet in a bucket is told as one on the disk; one that lies in both places as one fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace import object_store
from tests.support.command import Command
from tests.support.stores.s3_server import BUCKET, S3Server, client
from tests.support.verdicts.fleet_builder import Trained, build

pytestmark = pytest.mark.slow

RUNS = [
    Trained(),
    Trained(day=8, host="node-2", lost=3, misuse=True),
    Trained(day=9, collapses=True),
    Trained(day=9, device="cpu", ranks=2, world_size=4, lost=2),
]
URL = f"s3://{BUCKET}/teams/vision/2026 week+1"


@pytest.fixture
def folder(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs, which are in the bucket as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "_trees", type(object_store._trees)())  # listings of another test's bucket
    monkeypatch.setattr(object_store, "_ANSWER_S", 30.0)  # nothing fails here, and a busy machine takes its time
    folder, sent = build(tmp_path / "fleet", RUNS), client(s3)
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            key = f"{URL.removeprefix(f's3://{BUCKET}/')}/{path.relative_to(folder).as_posix()}"
            sent.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    return folder


def told(ampscope_command: Command, *arguments: object) -> Any:
    answer = ampscope_command("fleet", *arguments, "--json")
    assert (answer.code, answer.err) == (0, "")
    return json.loads(answer.out)


def test_it_is_told_as_on_the_disk(ampscope_command: Command, folder: Path) -> None:
    here, there = (told(ampscope_command, where) for where in (folder, URL))
    assert there["collapses"][0]["run"] == f"{URL}/day 9/run-2"
    assert here["collapses"][0].pop("run") != there["collapses"][0].pop("run")
    assert there == here
    assert there["recorded"] == 2


def test_runs_of_both_places_are_one_fleet(ampscope_command: Command, folder: Path) -> None:
    found = told(ampscope_command, folder, URL)
    assert (found["runs"], found["lost"]["lost"], found["collapsed_runs"]) == (8, 2 * (3 + 2 * 2), 2)


@pytest.mark.usefixtures("folder")
def test_a_verdict_on_a_run_in_the_bucket_is_kept(ampscope_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    first = told(ampscope_command, URL)
    monkeypatch.setattr("ampscope.analysis.diagnosis.fleet.verdict_of", None)
    assert told(ampscope_command, URL) == first
    assert first["verdicts"] != {"not_diagnosed": len(RUNS)}


def test_a_bucket_that_is_not_there_is_told(ampscope_command: Command, s3: S3Server) -> None:
    assert s3.url
    answer = ampscope_command("fleet", "s3://no-such-bucket/runs")
    assert answer.code == 2
    assert "no-such-bucket" in answer.err
