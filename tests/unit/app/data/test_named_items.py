"""The names under which addresses hold incidents and findings."""

from __future__ import annotations

from dataclasses import replace

from data.run_results import incident_at, named_items
from tests.support.paths import ROOT
from tests.support.verdicts.of_scenes import CALIBRATION, CLIPPED, OVERFLOW, diagnosis_of

DIAGNOSIS = diagnosis_of(ROOT / "overflow")


def test_each_has_a_name_of_its_own_and_harmless_ones_come_last() -> None:
    twice = replace(DIAGNOSIS, incidents=(CALIBRATION, OVERFLOW, OVERFLOW), findings=(CLIPPED,))
    names = list(named_items(twice))
    assert len(set(names)) == 4
    assert names[0] == "260-fp16_overflow"
    assert names[-1] == "0-benign_initial_calibration"


def test_a_step_belongs_to_the_incident_that_spans_it() -> None:
    assert incident_at(DIAGNOSIS, 262, 0) == ("260-fp16_overflow", OVERFLOW)
    assert incident_at(DIAGNOSIS, 2, 0) == ("0-benign_initial_calibration", CALIBRATION)
    assert incident_at(DIAGNOSIS, 100, 0) is None
