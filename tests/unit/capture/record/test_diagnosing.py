"""What another process says of a run, and which part of it an alert takes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.capture.record.alerts import Alert, AlertKind, Diagnosing, diagnosed
from ampscope.report.json import as_plain
from tests.support.paths import ROOT

SAMPLES = ROOT / "sample_logs"


def alert(step: int, kind: AlertKind = AlertKind.INCIDENT, **known: Any) -> Alert:
    return Alert(kind=kind, step=step, what="something", run="/r", look="ampscope diagnose /r", time=1.0, **known)


def told(sample: str) -> dict[str, Any]:
    plain: dict[str, Any] = as_plain(diagnose(SAMPLES / sample))
    return plain


def test_an_incident_takes_the_summary_of_what_is_told_first() -> None:
    diagnosis = told("attention-overflow")
    primary = diagnosis["primary"]
    found = diagnosed(alert(primary["last_step"], replay="exact"), diagnosis)
    assert (found.verdict, found.summary) == ("problem", diagnosis["summary"])
    assert (found.cause, found.severity, found.op) == ("fp16_overflow", "error", primary["op"])
    assert (found.module, found.file, found.line) == (
        primary["module"],
        primary["source"]["file"],
        primary["source"]["line"],
    )
    assert found.remedy == primary["remedies"][0]["text"]
    lines = found.text.splitlines()
    assert lines[0].endswith("something (replay: exact).")
    assert lines[1:3] == [diagnosis["summary"], found.place]
    assert found.place == f"{found.op} in {found.module}, {found.file}:{found.line}"
    assert (lines[3], lines[4]) == (f"Remedy: {found.remedy}", "Look: ampscope diagnose /r")


def test_a_step_that_the_diagnosis_does_not_tell_keeps_what_the_training_saw() -> None:
    diagnosis = told("attention-overflow")
    found = diagnosed(alert(10**6), diagnosis)
    assert (found.verdict, found.summary, found.cause) == ("problem", "", "")
    assert found.text == "step 1,000,000: something.\nLook: ampscope diagnose /r"


def test_a_finding_is_known_by_its_cause() -> None:
    diagnosis = told("clip-before-unscale")
    found = diagnosed(alert(0, AlertKind.FINDING, cause="misuse_clip_before_unscale"), diagnosis)
    (finding,) = (each for each in diagnosis["findings"] if each["cause"] == found.cause)
    assert found.severity == finding["severity"]
    assert found.remedy == finding["remedies"][0]["text"]
    assert found.file
    assert diagnosed(alert(0, AlertKind.FINDING, cause="misuse_missing_scaler"), diagnosis).summary == ""


def test_what_lies_ahead_is_not_taken_for_what_went_wrong() -> None:
    diagnosis = told("attention-overflow")
    ahead = {**diagnosis["primary"], "headroom_bits": 0.5, "cause": "near_overflow", "explanation": "It is near."}
    both = {**diagnosis, "incidents": [ahead, *diagnosis["incidents"]]}
    step = diagnosis["primary"]["step"]
    assert diagnosed(alert(step, AlertKind.AHEAD), both).summary == "It is near."
    assert diagnosed(alert(step), both).cause == "fp16_overflow"


def test_it_is_the_command_that_people_use() -> None:
    found = Diagnosing(SAMPLES / "log-zero")()
    assert found is not None
    assert found == {**told("log-zero"), "run": {**found["run"]}}
    assert found["run"]["name"] == "log-zero"


@pytest.mark.parametrize(
    "code",
    ["raise SystemExit(2)", "print('no JSON')", "print('[]')"],
    ids=["fails", "prints other things", "no object"],
)
def test_without_a_diagnosis_there_is_none(code: str, tmp_path: Path) -> None:
    assert Diagnosing(tmp_path, (sys.executable, "-c", code))() is None


def test_without_an_interpreter_there_is_none(tmp_path: Path) -> None:
    assert Diagnosing(tmp_path, (str(tmp_path / "python"),))() is None


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    diagnosing = Diagnosing(tmp_path, (sys.executable, "-c", code))
    diagnosing.deadline = time.monotonic() + 0.5
    before = time.monotonic()
    assert diagnosing() is None
    assert time.monotonic() - before < 30
    begun.unlink(missing_ok=True)
    assert diagnosing() is None
    assert not begun.exists(), "after the end nothing is begun"
