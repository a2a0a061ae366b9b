"""Runs of another schema version: older ones open as they are, of a newer one nobody shows a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ampscope
from ampscope.errors import RunTooNew
from ampscope.trace import manifest as manifests
from ampscope.trace.files.layout import list_table, span_of, table_folder
from ampscope.trace.manifest import Manifest, read_manifest
from ampscope.trace.schema import MANIFEST, SCHEMA_VERSION, Table
from ampscope.trace.write.sealing import FAN_IN
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt
from tests.support.trace_builder import TraceBuilder


def as_version(folder: Path, version: int) -> None:
    """Let a run's manifest name another version."""
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": version}))


def with_merged_parts(folder: Path) -> Path:
    """A run whose journals are sealed so soon that their parts are merged."""
    trace = TraceBuilder(folder)
    rows = [trace.step() for _ in range(2 * FAN_IN)]
    trace.close()
    with TraceWriter(folder, manifest=Manifest(), seal_at=SealAt(rows=1)) as writer:
        for row in rows:
            writer.put(Table.STEPS, [row._replace(step=row.step + len(rows))])
            assert writer.flush()
    parts = list_table(table_folder(folder, 0, Table.STEPS)).parts.values()
    assert any(span_of(part).last > span_of(part).first for part in parts)
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_run_opens_as_it_is(version: int, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    rows = [trace.step() for _ in range(3)]
    trace.close()
    as_version(run_folder, version)
    with ampscope.open_run(run_folder) as run:
        assert run.manifest.schema == version
        assert [(row.step, row.time) for row in run.rows(Table.STEPS)] == [(row.step, row.time) for row in rows]


def test_a_reader_that_knows_no_merged_parts_is_told_to_be_upgraded(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to version 2 a reader passed over their names, and showed the rest as the whole run."""
    with_merged_parts(run_folder)
    with ampscope.open_run(run_folder) as run:
        assert [row.step for row in run.rows(Table.STEPS)] == list(range(4 * FAN_IN))
    monkeypatch.setattr(manifests, "SCHEMA_VERSION", 2)
    with pytest.raises(RunTooNew, match=r"written with trace schema \d+, this AMPscope reads up to 2: upgrade it"):
        ampscope.open_run(run_folder)


def test_an_older_run_that_is_gone_on_with_is_of_todays_version(run_folder: Path) -> None:
    """For what is written into it from now on may be merged with what it had."""
    trace = TraceBuilder(run_folder)
    trace.step()
    trace.close()
    as_version(run_folder, 2)
    with_merged_parts(run_folder)
    assert read_manifest(run_folder).schema == SCHEMA_VERSION > 2
