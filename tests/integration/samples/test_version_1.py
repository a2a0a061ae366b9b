"""Runs that schema version 1 wrote say today what they said then, word for word, and can be gone on with.

``version_1/`` holds such runs, each with the diagnosis that was printed for it when the version was current, as text
(but for a reason that was said twice, what is said since of remedies that were not tried, how numbers are written,
and what stood in two places) and as JSON: a training whose code converts to half precision by hand, one that fails at
a logarithm, and a trace with every form of usage mistake, half of it still in journals because its writer was killed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import ampscope
from ampscope.analysis.results import Incident
from ampscope.errors import RunTooNew
from ampscope.report.json import as_plain
from ampscope.report.terminal.diagnosis_text import as_text
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import MANIFEST, SCHEMA_VERSION, Change, ReplayStatus, Table, Trial
from ampscope.trace.vocabulary import Cause, MistakeForm
from tests.support.printed import printed
from tests.support.trace_builder import TraceBuilder

#: Forms of a mistake that were not known when these traces were written.
NEWER = {MistakeForm.NOTHING_SCALED, MistakeForm.UNSCALED_FOR_ANOTHER, MistakeForm.SCALED_TWICE} | {
    form for form in MistakeForm if form.startswith(("autocast_", "all_frozen", "no_gradient", "zero_gradients"))
}
NEWER |= {
    form
    for form in MistakeForm
    if form.startswith(("gradients_", "other_", "rounded_", "no_learning", "learning_", "cast_", "kept_"))
}
VERSION_1 = Path(__file__).parent / "version_1"
RUNS = sorted(manifest.parent.name for manifest in VERSION_1.glob(f"*/{MANIFEST}"))


def columns_on_disk(folder: Path, table: Table) -> set[str]:
    """The columns of every sealed part of a table."""
    return {name for part in folder.glob(f"rank=*/{table.value}/*.parquet") for name in pq.read_schema(part).names}


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(VERSION_1 / name, folder)
    return folder


def test_the_runs_are_of_version_1() -> None:
    assert RUNS == ["conversions", "log-zero", "mistakes"]
    for name in RUNS:
        assert read_manifest(VERSION_1 / name).schema == 1
    assert "conversions" in columns_on_disk(VERSION_1 / "conversions", Table.REPLAYS)
    assert "conversions" not in columns_on_disk(VERSION_1 / "log-zero", Table.REPLAYS)  # written before there were any
    assert "form" not in columns_on_disk(VERSION_1 / "mistakes", Table.FINDINGS)


@pytest.mark.parametrize("name", RUNS)
def test_the_text_is_what_it_was(name: str) -> None:
    with ampscope.open_run(VERSION_1 / name) as run:
        found = ampscope.diagnose(run)
    if isinstance(found.primary, Incident):  # the last good step was not told then
        found = replace(found, primary=replace(found.primary, last_good=None))
    others = [each for each in found.incidents if each.last_good is None]
    found = replace(found, incidents=tuple(others))
    assert printed(as_text(found)).rstrip() == (VERSION_1 / f"{name}.txt").read_text().rstrip()


@pytest.mark.parametrize("name", RUNS)
def test_the_json_is_what_it_was(name: str) -> None:
    with ampscope.open_run(VERSION_1 / name) as run:
        said: dict[str, Any] = as_plain(ampscope.diagnose(run))
    del said["run"]["path"]
    then = json.loads((VERSION_1 / f"{name}.json").read_text())
    assert _where_both(said, then) == _where_both(then, said)


def _where_both(one: Any, other: Any) -> Any:
    """``one`` without what ``other`` does not know: what is empty, as a statistic that was not measured then, how many
    ranks there are, how much was checked, the last good step, and of a remedy its kind, why it was not tried, its diff.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        new = {
            key
            for key, value in one.items()
            if key not in other and (not value or key in ("world", "last_good", "kind", "untried", "diff", "checked"))
        }
        return {key: _where_both(value, other.get(key)) for key, value in one.items() if key not in new}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_where_both(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
    return one


def test_every_form_of_a_mistake_is_read_from_its_english(run_folder: Path) -> None:
    with ampscope.open_run(VERSION_1 / "mistakes") as run:
        rows = run.rows(Table.FINDINGS)
    assert {MistakeForm(row.form) for row in rows if row.form} == set(MistakeForm) - NEWER
    assert {row.evidence for row in rows} == {"{}", '{"optimizer_steps": 500}', '{"why": "unheard of"}'}


def test_conversions_are_read_from_their_texts() -> None:
    with ampscope.open_run(VERSION_1 / "conversions") as run:
        row = run.rows(Table.REPLAYS, change=Change.CONVERSIONS, step=0)[0]
    assert (row.outcome, row.conversion_files) == (Trial.NONFINITE, ("conversions.py", "conversions.py"))
    assert row.conversion_lines == (15, 25)
    assert row.conversion_codes is not None
    assert row.conversion_codes[0] == "return (self.inner(x) * 0 + 12.0).float().half().exp().float()"


def test_incidents_are_read_from_their_json() -> None:
    with ampscope.open_run(VERSION_1 / "mistakes") as run:
        rows = run.rows(Table.INCIDENTS)
    assert [(row.bad_params, row.over_budget, row.evidence) for row in rows] == [(("fc.weight",), True, "{}")] * 2
    with ampscope.open_run(VERSION_1 / "log-zero") as run:
        rows = run.rows(Table.INCIDENTS)
    assert {row.over_budget for row in rows} == {True, False}
    assert all(row.bad_params for row in rows)
    assert [row.evidence for row in rows if '"mul args[1]": [62]' in row.evidence]
    assert not [row.evidence for row in rows if "params" in row.evidence]


def test_every_way_of_reading_gives_todays_columns() -> None:
    with ampscope.open_run(VERSION_1 / "mistakes") as run:
        assert run.sql("SELECT count(*) FROM findings WHERE form = 'unscale_twice'").fetchall() == [(1,)]
        assert "form" in run.findings.collect_schema().names()
    forms = Scan(VERSION_1 / "mistakes").read(Table.FINDINGS, 0, ["form"])["form"].to_pylist()
    assert set(forms) == {"", *(set(MistakeForm) - NEWER)}


@pytest.mark.parametrize("name", RUNS)
def test_it_is_gone_on_with(name: str, tmp_path: Path) -> None:
    """What the old version left in journals is sealed as it is; both versions' files are read as one run."""
    folder = copied(name, tmp_path / name)
    with ampscope.open_run(folder) as run:
        steps, findings = run.rows(Table.STEPS), len(run.rows(Table.FINDINGS))
        before = ampscope.diagnose(run)
    trace = TraceBuilder(folder)
    row = trace.step(duration_s=0.5, observing_s=0.25)
    trace.finding(Cause.MISUSE_NO_UNSCALE, form=MistakeForm.DECISION_ON_SCALED, step=row.step)
    trace.incident(step=row.step, replay=ReplayStatus.UNAVAILABLE, bad_params=("fc.weight",))
    trace.replay(Change.CONVERSIONS, Trial.FINITE, step=row.step, conversion_files=("a.py",), conversion_lines=(3,))
    trace.close()
    assert (row.step, row.segment) == (steps[-1].step + 1, steps[-1].segment + 1)
    assert read_manifest(folder).schema == SCHEMA_VERSION
    with ampscope.open_run(folder) as run:
        assert list(map(repr, run.rows(Table.STEPS))) == list(map(repr, [*steps, row]))
        found = run.rows(Table.FINDINGS)
        assert (len(found), found[-1].form) == (findings + 1, MistakeForm.DECISION_ON_SCALED)
        assert run.rows(Table.REPLAYS)[-1].conversion_files == ("a.py",)
        assert run.rows(Table.INCIDENTS)[-1].bad_params == ("fc.weight",)
        after = ampscope.diagnose(run)
    assert {each.explanation for each in before.findings} <= {each.explanation for each in after.findings}


def test_a_newer_version_than_todays_is_refused(tmp_path: Path) -> None:
    folder = copied("mistakes", tmp_path / "newer")
    manifest = json.loads((folder / MANIFEST).read_text()) | {"schema": SCHEMA_VERSION + 1}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RunTooNew, match=rf"schema {SCHEMA_VERSION + 1}, .* reads up to {SCHEMA_VERSION}: upgrade it"):
        ampscope.open_run(folder)
    with pytest.raises(RunTooNew):
        TraceBuilder(folder)
