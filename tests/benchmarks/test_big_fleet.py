"""The benchmark's fleets are what they say, the same each time, and what was measured of them can be drawn."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ampscope.analysis.diagnosis.fleet import Diagnosed, fleet
from ampscope.trace.read.find import runs_below
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from tests.support.paths import ROOT

FOLDER = ROOT / "benchmarks" / "large_traces"
RUNS, RANKS, STEPS = 12, 2, 50


def written(folder: Path) -> Path:
    sizes = ["--runs", RUNS, "--ranks", RANKS, "--steps", STEPS]
    command = [sys.executable, FOLDER / "big_fleet.py", folder, *sizes]
    subprocess.run([*map(str, command)], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    return folder


def test_a_fleet_has_the_size_that_was_asked_for_and_is_the_same_each_time(tmp_path: Path) -> None:
    one, other = (runs_below([written(tmp_path / name)]) for name in ("one", "other"))
    found = fleet(one, diagnosed=Diagnosed.NONE)
    assert (found.runs, found.ranks, found.lost.steps) == (RUNS, RUNS * RANKS, RUNS * RANKS * STEPS)
    assert found.lost.calibrating == RUNS * RANKS * 2
    assert found.recorded
    for pair in zip(one, other, strict=True):
        first, second = ([*map(open_run(run).rows, (Table.STEPS, Table.INCIDENTS, Table.FINDINGS))] for run in pair)
        assert first == second


def test_what_was_measured_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    measured = json.loads((ROOT / "benchmarks" / "results" / "fleet.json").read_text())
    drawn = importlib.import_module("fleet_plot").picture(measured)
    points = [each for each in ET.fromstring(drawn).iter() if each.tag.endswith("circle")]
    shown = sum(row["ranks"] == 1 for row in measured["fleet"]) + 1 + len(measured["ranges"])  # one in two panels
    assert len(points) == 2 * shown
    assert drawn == (ROOT / "docs" / "pictures" / "fleet.svg").read_text()
