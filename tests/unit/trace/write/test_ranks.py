"""Several ranks that write into one run: whose manifest it is, and what is left when one of them never comes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.manifest import Manifest, read_manifest, write_first_manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import MANIFEST, EventKind, EventRow, Table
from ampscope.trace.write.writer import TraceWriter


def writer(folder: Path, rank: int) -> TraceWriter:
    trace = TraceWriter(folder, manifest=Manifest(name=f"by rank {rank}", world_size=4, job=("a job",)), rank=rank)
    trace.put(Table.EVENTS, [EventRow(0, trace.resume.segment, 0.0, EventKind.START, "")])
    return trace


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_rank_0_has_the_manifest_whoever_comes_first(order: tuple[int, ...], run_folder: Path) -> None:
    traces = [writer(run_folder, rank) for rank in order]
    assert all(trace.resume.segment == 0 for trace in traces)
    assert open_run(run_folder).status == "open"
    for trace in traces:
        trace.close()
    run = open_run(run_folder)
    assert (run.manifest.name, run.status, run.ranks) == ("by rank 0", "closed", [0, 1, 2])
    assert len(run.manifest.segments) == 1
    assert run.manifest.job == ("a job",)


def test_a_run_to_which_rank_0_never_comes(run_folder: Path) -> None:
    first, second = writer(run_folder, 3), writer(run_folder, 1)
    assert open_run(run_folder).status == "open"
    second.close()
    assert open_run(run_folder).status == "open"
    first.close()
    run = open_run(run_folder)
    assert (run.manifest.name, run.status, run.ranks) == ("by rank 3", "closed", [1, 3])
    assert run.manifest.segments == ()


def test_one_that_died_before_rank_0_came_is_interrupted(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = writer(run_folder, 3)
    trace.flush()
    monkeypatch.setattr("ampscope.trace.read.run.is_locked", lambda _: False)
    assert open_run(run_folder).status == "interrupted"
    trace.close()


@pytest.mark.parametrize("links", [True, False])
def test_of_many_first_manifests_one_is_written(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError("links are not supported")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    with ThreadPoolExecutor(8) as ranks:
        manifests = (Manifest(name=str(rank)) for rank in range(8))
        first = list(ranks.map(lambda manifest: write_first_manifest(tmp_path, manifest), manifests))
    assert sum(first) == 1
    assert read_manifest(tmp_path).name == str(first.index(True))
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_a_manifest_of_before_has_no_job(run_folder: Path) -> None:
    writer(run_folder, 0).close()
    path = run_folder / MANIFEST
    known = json.loads(path.read_text())
    del known["job"]
    path.write_text(json.dumps(known))
    assert read_manifest(run_folder).job == ()
