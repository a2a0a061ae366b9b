from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampscope.errors import RunDamaged, RunNotFound, RunTooNew
from ampscope.trace.manifest import Manifest, Segment, read_manifest, write_manifest
from ampscope.trace.schema import MANIFEST, SCHEMA_VERSION

FULL = Manifest(
    ampscope="0.1.0",
    versions={"python": "3.11.2", "torch": "2.13"},
    device="NVIDIA H200",
    world_size=2,
    created=1.7e9,
    name="night run",
    model="GPT",
    parameters=124_000_000,
    configuration={"every": 100, "betas": [0.9, 0.95]},
    segments=(Segment(started=1.7e9, pid=1), Segment(started=1.8e9, pid=2, locked=False)),
    closed=1.9e9,
    tags=("fp16", "\u00e9t\u00e9"),
)


@pytest.mark.parametrize("manifest", [FULL, Manifest()])
def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_what_json_does_not_know_is_kept_as_text(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(configuration={"folder": Path("data"), "name": "\udcff"}))
    assert read_manifest(tmp_path).configuration["folder"] == "data"


def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    write_manifest(tmp_path, FULL)
    circular: dict[str, Any] = {}
    circular["self"] = circular
    with pytest.raises(RecursionError):
        write_manifest(tmp_path, Manifest(configuration=circular))
    assert read_manifest(tmp_path) == FULL


def test_keys_of_a_newer_minor_version_are_passed_over(tmp_path: Path) -> None:
    write_manifest(tmp_path, FULL)
    path = tmp_path / MANIFEST
    data = json.loads(path.read_text())
    data["weather"] = "fine"
    data["segments"][0]["mood"] = "good"
    path.write_text(json.dumps(data))
    assert read_manifest(tmp_path) == FULL


@pytest.mark.parametrize("folder", ["", "missing", MANIFEST + "x"])
def test_no_run(tmp_path: Path, folder: str) -> None:
    (tmp_path / (MANIFEST + "x")).write_text("a file")
    with pytest.raises(RunNotFound, match=r"no run in .*holds no run\.json.*Give the run"):
        read_manifest(tmp_path / folder)


def test_a_newer_schema_asks_for_an_upgrade(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(schema=SCHEMA_VERSION + 1))
    with pytest.raises(RunTooNew, match="upgrade"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "\x00" * 100,
        "[" * 100_000,
        '{"schema": "1"}',
        '{"schema": 1, "segments": [{}]}',
        '{"schema": 1, "segments": [null]}',
        '{"schema": 1, "segments": {"a": 1}}',
        '{"schema": 1, "created": "yesterday"}',
        '{"schema": 1, "closed": []}',
        '{"schema": 1, "versions": []}',
    ],
)
def test_damage_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(RunDamaged, match=r"run\.json cannot be read"):
        read_manifest(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunDamaged):
        read_manifest(tmp_path)
